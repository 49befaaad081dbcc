"""Tables, figures and pages of records."""

from packmamba.errors import require

require("jinja2", "matplotlib", "pandas", "scipy")
