"""The command line: reads arguments, calls the library, prints for people. Nothing else imports it."""
