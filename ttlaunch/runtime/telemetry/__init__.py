"""What a rank writes down about itself: traffic, waits, timeline, black box, records."""
