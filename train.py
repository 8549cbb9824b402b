"""Train with a length pool: `python train.py fit --config configs/demo.yaml`, see `python train.py --help`."""

from lightning_lengthpool.cli import main

if __name__ == "__main__":
    main()
