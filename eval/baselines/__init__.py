"""The two directions that MosaicKV joins, one file each: fewer tokens (Quest), fewer channels (ThinK)."""
