from tlt_rl import main

main()
