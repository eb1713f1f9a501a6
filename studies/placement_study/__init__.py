"""This package holds the parts of the placement study: arms, runs, figures, report and plot."""
