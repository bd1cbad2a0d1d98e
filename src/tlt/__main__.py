from tlt.cli import main

main()
