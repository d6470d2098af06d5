"""Tool calling: what is asked, how models write calls, and how calls are read back."""
