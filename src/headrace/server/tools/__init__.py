"""Tool calling: what requests ask for, how models write calls, and how calls are parsed."""
