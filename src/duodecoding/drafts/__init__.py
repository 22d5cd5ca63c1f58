"""Drafts that come with the package: files only. How they were made: docs/drafts.md."""
