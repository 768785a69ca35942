"""Pages of HTML that need nothing but themselves: templates, charts, and text from files."""
