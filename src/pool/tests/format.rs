//! `docs/format.md` is true: a new pool is read by nothing but the offsets in its tables.
#![forbid(unsafe_code)]

use super::*;

/// A table's rows of (offset, bytes, field) in the section with that heading.
struct Table(Vec<(usize, usize, String)>);

impl Table {
    fn of(page: &str, heading: &str) -> Table {
        let section = page.split("\n## ").find(|section| section.starts_with(&format!("{heading}\n")));
        let section = section.unwrap_or_else(|| panic!("no section {heading}"));
        let table = section.split("| offset | bytes | field |").nth(1).expect("a table of offsets");
        let rows = table.lines().skip(2).take_while(|line| line.starts_with('|')).filter_map(|line| {
            let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
            Some((cells[0].parse().ok()?, cells.get(1)?.parse().ok()?, (*cells.get(2)?).to_owned()))
        });
        let rows: Vec<(usize, usize, String)> = rows.collect();
        assert!(rows.len() > 2, "{heading}: {rows:?}");
        // Nothing is left out: each field begins where the one before ends.
        for pair in rows.windows(2) {
            assert_eq!(pair[0].0 + pair[0].1, pair[1].0, "{heading}: after {}", pair[0].2);
        }
        Table(rows)
    }

    fn get<'a>(&self, block: &'a [u8], field: &str) -> &'a [u8] {
        let row = self.0.iter().find(|(_, _, name)| name == field);
        let (offset, bytes, _) = row.unwrap_or_else(|| panic!("no field {field}"));
        &block[*offset..offset + bytes]
    }

    fn number(&self, block: &[u8], field: &str) -> u64 {
        self.get(block, field).iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
    }

    /// Whether the block's own checksum fits, over `len` bytes.
    fn crc_fits(&self, block: &[u8], len: usize) -> bool {
        let (offset, _, _) = self.0.iter().find(|(_, _, name)| name == "crc").expect("a field crc");
        let mut zeroed = block[..len].to_vec();
        zeroed[*offset..offset + 4].fill(0);
        u64::from(crate::crc32c::crc32c(&zeroed)) == self.number(block, "crc")
    }
}

#[test]
fn a_new_pool_is_read_by_the_offsets_in_the_page() {
    run(async {
        let page = include_str!("../../../docs/format.md");
        let devices = [ram(64)];
        let (manager, pool) = pool_on(&devices).await;
        pool.volume_create(spec("v", 16)).await.unwrap();
        write(&pool, "v", 0, &pattern(1, 0, 4 << 20)).await;
        pool.open("v").await.unwrap().flush().await.unwrap();
        let early = devices[0].image().unwrap();
        pool.check(CheckOptions::default()).await.unwrap();
        let uuid = pool.uuid();
        manager.export("p").await.unwrap();
        let image = devices[0].image().unwrap();
        let block = |at: u64| &image[at as usize * 4096..(at as usize + 1) * 4096];

        let label = Table::of(page, "Label");
        let first = block(0);
        assert_eq!(label.get(first, "magic"), b"RIMROCK\x01");
        assert_eq!((label.number(first, "version"), label.number(first, "vdevs")), (1, 1));
        assert_eq!(label.get(first, "pool"), uuid.as_bytes());
        assert_eq!(&label.get(first, "name")[..2], b"p\0");
        assert!(label.crc_fits(first, 4096));
        let shards = label.number(first, "shards");
        assert_eq!((shards, label.number(first, "device_blocks")), (4, (64 << 20) / 4096));
        assert_eq!(block(label.number(first, "device_blocks") - 1), first);

        let root = Table::of(page, "Root slot");
        let mut generations = Vec::new();
        for shard in 0..shards {
            let slots = (0..2).map(|slot| block(1 + shard * 2 + slot));
            let newest = slots.max_by_key(|slot| root.number(slot, "generation")).unwrap();
            assert_eq!(root.get(newest, "magic"), b"RMRT");
            assert!(root.crc_fits(newest, 4096));
            assert_eq!(root.get(newest, "pool"), uuid.as_bytes());
            let generation = root.number(newest, "generation");
            assert_eq!((root.number(newest, "shard"), root.number(newest, "reaping_node")), (shard, 0));
            assert_eq!(block(1 + (shards + shard) * 2 + generation % 2), newest, "the second copy");
            generations.push(generation);
            // Down the tree of bitmaps, to one.
            let mut pointer: u128 = u128::from_le_bytes(root.get(newest, "space").try_into().unwrap());
            for level in (0..=4).rev() {
                let at = (pointer & ((1 << 40) - 1)) as u64;
                let stored = block(at);
                assert_eq!(u128::from(crate::crc32c::crc32c(stored)), pointer >> 96, "level {level}");
                if level == 0 {
                    let region = Table::of(page, "Region record");
                    assert_eq!(region.get(stored, "magic"), b"RMSP");
                    assert_eq!(region.number(stored, "shard"), shard);
                    let ones: u32 = region.get(stored, "bits").iter().map(|byte| byte.count_ones()).sum();
                    assert_eq!(u64::from(ones), region.number(stored, "used"));
                    assert_eq!(region.number(stored, "blocks"), label.number(first, "region_blocks"));
                    break;
                }
                let pointers = stored.chunks(16).map(|raw| u128::from_le_bytes(raw.try_into().unwrap()));
                pointer = pointers.into_iter().find(|raw| *raw != 0).unwrap();
            }
        }
        assert!(generations.iter().all(|generation| *generation > 1));

        let journal = Table::of(page, "Journal");
        let (ring, journals) = (label.number(first, "journal_blocks"), 1 + 4 * shards);
        for shard in 0..shards {
            let blocks =
                (0..ring).map(|at| &early[((journals + shard * ring + at) * 4096) as usize..][..4096]);
            let written: Vec<&[u8]> = blocks.filter(|block| journal.get(block, "magic") == b"RMJR").collect();
            assert!(!written.is_empty());
            for block in written {
                assert!(journal.crc_fits(block, 4096));
                assert_eq!(journal.number(block, "shard"), shard);
                assert!(journal.number(block, "records") > 0);
            }
        }

        let catalog = Table::of(page, "Catalog");
        let start = journals + 2 * shards * ring;
        let transaction = &image[start as usize * 4096..];
        assert_eq!(catalog.get(transaction, "magic"), b"RMCT");
        assert_eq!(catalog.get(transaction, "pool"), uuid.as_bytes());
        assert!(catalog.crc_fits(transaction, catalog.number(transaction, "bytes") as usize));
    });
}

/// Changes bytes of both labels and makes their checksums fit.
async fn relabel(device: &Device, at: usize, bytes: &[u8]) {
    for block in [0, device.info().size / 4096 - 1] {
        let (result, mut label) = device.read(block * 4096, DmaBuf::uninit(4096)).await;
        result.unwrap();
        label[at..at + bytes.len()].copy_from_slice(bytes);
        label[12..16].fill(0);
        let crc = crate::crc32c::crc32c(&label);
        label[12..16].copy_from_slice(&crc.to_le_bytes());
        device.write(block * 4096, label.freeze()).await.unwrap();
    }
}

#[test]
fn a_pool_of_a_newer_format_is_refused_by_name_and_left_as_it_is() {
    run(async {
        let devices = [ram(64)];
        let (manager, pool) = pool_on(&devices).await;
        pool.volume_create(spec("v", 16)).await.unwrap();
        write(&pool, "v", 0, &pattern(1, 0, 4 << 20)).await;
        drop(pool);
        manager.export("p").await.unwrap();
        relabel(&devices[0], 8, &2u32.to_le_bytes()).await;
        let image = devices[0].image().unwrap();
        let error = manager.import(devices.to_vec()).await.map(drop).unwrap_err();
        assert_eq!(error.kind, crate::pool::PoolErrorKind::Failed);
        assert!(error.text.contains("has format 2; this Rimrock knows format 1"), "{error}");
        // A blank device would be taken: this one is not.
        let error =
            manager.create("q", devices.to_vec(), PoolOptions::default()).await.map(drop).unwrap_err();
        assert!(error.text.contains("format 2"), "{error}");
        for repair in [false, true] {
            let options = CheckOptions { repair, data: true };
            match crate::pool::check_devices(devices.to_vec(), options).await {
                Ok(report) => assert!(!report.clean, "{report:#?}"),
                Err(error) => assert!(error.text.contains("no label"), "{error}"),
            }
        }
        assert!(devices[0].image().unwrap() == image, "something was written");
        relabel(&devices[0], 8, &1u32.to_le_bytes()).await;
        let pool = manager.import(devices.to_vec()).await.unwrap();
        assert_eq!(read(&pool, "v", 0, 4 << 20).await, pattern(1, 0, 4 << 20));
    });
}
