"""No layout and no batching changes a result: a table of cells, one oracle, and the page that shows
how far each cell is from it.
"""
