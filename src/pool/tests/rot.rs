//! Damage on the devices: a flipped bit in any metadata block is found, named, and read around.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;

use super::*;
use crate::device::IoError;

/// A pool with a bit of everything as a crash would leave it, what its volume holds, and its live metadata blocks.
async fn sample(journal: bool) -> (Vec<u8>, Vec<u8>, Vec<u64>) {
    let devices = [ram(64)];
    let (manager, pool) = pool_on(&devices).await;
    pool.volume_create(spec("v", 16)).await.unwrap();
    write(&pool, "v", 0, &pattern(1, 0, 6 << 20)).await;
    pool.snapshot_create("v", "v@1").await.unwrap();
    write(&pool, "v", 3 << 20, &pattern(2, 0, 6 << 20)).await;
    let bytes = read(&pool, "v", 0, 16 << 20).await;
    pool.open("v").await.unwrap().flush().await.unwrap();
    if !journal {
        pool.check(CheckOptions::default()).await.unwrap();
    }
    let mut live: BTreeSet<u64> = BTreeSet::from([0, (64 << 20) / 4096 - 1]);
    let home = crate::pool::lifecycle::home(pool.key()).unwrap();
    live.extend(home.live_catalog());
    let image = devices[0].image().unwrap();
    for shard in 0..4 {
        let shard = crate::pool::local::shard(pool.key(), shard).unwrap();
        live.extend(shard.live_metadata().await.into_iter().map(|block| block.index()));
    }
    close(manager, &pool).await;
    (image, bytes, live.into_iter().collect())
}

async fn close(manager: impl AsRef<PoolManager>, pool: &std::sync::Arc<Pool>) {
    manager.as_ref().shut(pool).await.unwrap();
    // The committers see it and let the devices go.
    for _ in 0..3 {
        crate::reactor::yield_now().await;
    }
}

/// Imports an image; everything must be readable. Returns what was reported, also by a full check.
async fn examine(image: &[u8], bytes: &[u8]) -> Vec<String> {
    let device = Device::ram_from_image(image, 4096).unwrap();
    let manager = Rc::new(manager());
    let pool = manager.import(vec![device]).await.unwrap_or_else(|error| panic!("{error}"));
    assert!(read(&pool, "v", 0, 16 << 20).await == bytes);
    assert!(read(&pool, "v@1", 0, 6 << 20).await == pattern(1, 0, 6 << 20));
    let info = pool.info().await.unwrap();
    let mut said = info.damage;
    said.extend(info.unfinished);
    let report = pool.check(CheckOptions::default()).await.unwrap();
    said.extend(report.findings.into_iter().map(|finding| finding.what));
    close(manager, &pool).await;
    said
}

#[test]
fn a_flipped_bit_in_any_metadata_block_is_named_and_read_around() {
    run(async {
        for journal in [true, false] {
            let (image, bytes, live) = sample(journal).await;
            assert_eq!(examine(&image, &bytes).await, Vec::<String>::new());
            assert!(live.len() > 20, "only {} metadata blocks", live.len());
            for (i, block) in live.iter().enumerate() {
                // Most blocks once; their first 64 bytes are headers or pointers, all of them are under a checksum.
                let mut bad = image.clone();
                bad[*block as usize * 4096 + (i * 977) % 4096] ^= 1 << (i % 8);
                let said = examine(&bad, &bytes).await;
                assert!(!said.is_empty(), "journal={journal}: a flipped bit in block {block} is not named");
            }
            println!("journal={journal}: {} blocks", live.len());
        }
    });
}

#[test]
fn damaged_data_is_an_error_for_that_range_alone() {
    run(async {
        let (mut image, bytes, _) = sample(false).await;
        let lost = &bytes[4096 * 700..4096 * 701];
        let at = image.chunks(4096).position(|block| block == lost).unwrap() * 4096;
        image[at + 17] ^= 4;
        let manager = manager();
        let pool = manager.import(vec![Device::ram_from_image(&image, 4096).unwrap()]).await.unwrap();
        let v = pool.open("v").await.unwrap();
        let (result, found) = v.read(4096 * 700, DmaBuf::uninit(4096)).await;
        assert!(matches!(result, Err(IoError::Unrecovered { .. })));
        assert_eq!(found[..], [0; 4096], "wrong bytes are never handed out");
        assert_eq!(read(&pool, "v", 4096 * 701, 1 << 20).await, bytes[4096 * 701..][..1 << 20]);
        assert!(pool.info().await.unwrap().damage[0].contains("does not fit its checksum"));
    });
}
