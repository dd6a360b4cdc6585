"""Turn results into something a person reads: a table, a page, a figure, a trace."""

from leanstep.reporters.files import report as report
from leanstep.reporters.terminal import render as render
from leanstep.reporters.terminal import render_html as render_html
