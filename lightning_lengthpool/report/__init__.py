"""Words, tables, figures and the page."""
