"""HTML pages that open offline: their frame, their style, and charts that are drawn on canvases by a few small scripts.

Reports of runs, plans and studies are made of these pieces.
"""
