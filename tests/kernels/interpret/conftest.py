import interpreter_repair

interpreter_repair.install()
