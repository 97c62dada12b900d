"""Reads run folders and shows what happened: tables of runs, comparisons and reports."""
