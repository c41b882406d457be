"""From stored rows to tables, figures and the report; neither torch nor a model."""
