from liger_aot.cli import main

raise SystemExit(main())
