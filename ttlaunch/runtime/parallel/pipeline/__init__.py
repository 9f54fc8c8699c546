"""A model cut into stages: schedules, links between them, a rank's part."""
