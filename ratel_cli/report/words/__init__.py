"""What is printed: lines, tables and the panel."""
