"""Parts of `pipeline.config`.

arguments   the words of a command line
help_text   --help
faults      what is wrong with an option or a settings file, in one line
unread      options in groups of groups, and those that nothing reads under the other settings
"""
