"""Turn a plan and its verdict into something a person reads."""

from leanstep.reporters.files import report as report
from leanstep.reporters.terminal import render as render
from leanstep.reporters.terminal import render_html as render_html
