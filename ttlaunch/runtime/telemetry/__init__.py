"""What a rank writes down about itself: traffic, waits, timeline, flight recorder, records."""
