"""What a run says of itself: the page, the comparison of runs, and the folder to publish."""
