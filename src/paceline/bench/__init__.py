"""Measurements of real engines: a matrix of drafters, workloads and loads, its checks and its report."""
