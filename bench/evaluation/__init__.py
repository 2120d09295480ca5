"""The parts of `bench.quality`: problems, prompts, backends, grading, statistics, report.

Data flows one way: problems -> prompts -> a backend's generations -> graded samples -> summaries
-> comparisons -> table, JSON and HTML. Everything between two arrows is in `records.py`.
"""
