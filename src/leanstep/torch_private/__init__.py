"""Every name of torch that begins with an underscore, with what it is for.

One file for each part of torch that they belong to. They were seen in torch 2.11 (CUDA) to 2.13
(CPU); a file says so where fewer versions have them. When a new torch breaks leanstep, the repair
belongs in this folder.
"""
