"""Folders of models as other libraries write and read them, without torch."""
