"""Faults planted one at a time in a copy of the project, to see that the tests of money find them: `make mutants`."""
