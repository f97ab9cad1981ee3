"""`megarl report` and the `report.html` of every run: a page of a run's folder that needs no network.

`folder` reads what a run has written, `curves` groups its metrics, `settings` compares its configuration with the
defaults and with another run; `page` is the command, and makes one HTML file of it with page.html, page.css and
page.js.  The package only reads files: it knows neither models nor processes, and changes nothing of a run.  Text of a
run reaches the page as JSON and is shown by `textContent`: it is never HTML or a script.
"""
