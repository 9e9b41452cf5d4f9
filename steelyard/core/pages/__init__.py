"""HTML pages that work offline: the page template, its style, and charts that small scripts draw on canvases.

The reports of runs, plans and studies use them.
"""
