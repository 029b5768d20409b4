"""Fit the planner's rates to runs with a known time, and compare its predictions with published runs."""
