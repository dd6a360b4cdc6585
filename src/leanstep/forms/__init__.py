"""Find the kinds of blocks of a step, compile each in several forms, and measure them."""

from leanstep.forms.compiled import profile_compiled as profile_compiled
