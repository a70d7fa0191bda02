"""A run from its inputs to its export: measured, planned, resumed or begun, trained."""
