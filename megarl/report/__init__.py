"""`megarl report` and the `report.html` of every run: a page of a run's folder that needs no network.

`folder` reads what a run has written, `curves` its metrics, `samples` its answers, `settings` its configuration beside
the defaults and beside another run; `page` makes one HTML file of it with page.html, page.css and page.js; `request`
and `command` are `megarl report`.  The package only reads files: it knows neither models nor processes, and changes
nothing of a run.  Text of a run reaches the page as JSON and is shown by `textContent`: it is never HTML or a script.
"""
