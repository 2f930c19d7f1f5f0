"""Pictures of layouts and of steps, 800 pixels wide, which are also read in black and white. Read
`layout.py` and `timeline.py`; both draw on `canvas.py`.
"""
