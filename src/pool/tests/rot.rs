//! Damage on the devices: a flipped bit in any metadata block is found, named, and read around.

use std::collections::BTreeSet;

use super::*;
use crate::device::IoError;

/// A pool with a bit of everything, closed or as a crash would leave it, and what its volume holds.
async fn sample(clean: bool) -> (Vec<u8>, Vec<u8>) {
    let devices = [ram(64)];
    let (manager, pool) = pool_on(&devices).await;
    pool.volume_create(spec("v", 16)).await.unwrap();
    write(&pool, "v", 0, &pattern(1, 0, 6 << 20)).await;
    pool.snapshot_create("v", "v@1").await.unwrap();
    write(&pool, "v", 3 << 20, &pattern(2, 0, 6 << 20)).await;
    let bytes = read(&pool, "v", 0, 16 << 20).await;
    pool.open("v").await.unwrap().flush().await.unwrap();
    if clean {
        manager.export("p").await.unwrap();
    }
    (devices[0].image().unwrap(), bytes)
}

/// Imports an image; everything must be readable. Returns what was reported, also by a full check.
async fn examine(image: &[u8], bytes: &[u8]) -> Vec<String> {
    let device = Device::ram_from_image(image, 4096).unwrap();
    let manager = manager();
    let pool = manager.import(vec![device]).await.unwrap_or_else(|error| panic!("{error}"));
    assert!(read(&pool, "v", 0, 16 << 20).await == bytes);
    assert!(read(&pool, "v@1", 0, 6 << 20).await == pattern(1, 0, 6 << 20));
    let mut said = pool.info().await.unwrap().damage;
    said.extend(pool.verify().await.unwrap());
    manager.shut(&pool).await.unwrap();
    said
}

/// The blocks that hold something and are not data: everything that differs from a blank device, less the data.
fn metadata_blocks(image: &[u8], bytes: &[u8]) -> Vec<usize> {
    let data: BTreeSet<&[u8]> =
        bytes.chunks(4096).chain(pattern(1, 0, 6 << 20).leak().chunks(4096)).collect();
    let blocks = image.chunks(4096).enumerate();
    blocks
        .filter(|(_, block)| block.iter().any(|byte| *byte != 0) && !data.contains(block))
        .map(|(i, _)| i)
        .collect()
}

#[test]
fn a_flipped_bit_in_any_metadata_block_is_read_around() {
    run(async {
        for clean in [true, false] {
            let (image, bytes) = sample(clean).await;
            assert_eq!(examine(&image, &bytes).await, Vec::<String>::new());
            let blocks = metadata_blocks(&image, &bytes);
            assert!(blocks.len() > 60, "only {} metadata blocks", blocks.len());
            let mut named = 0;
            for (i, block) in blocks.iter().enumerate() {
                let mut bad = image.clone();
                bad[block * 4096 + (i * 977) % 40] ^= 1 << (i % 8);
                named += usize::from(!examine(&bad, &bytes).await.is_empty());
            }
            // Blocks of earlier commits and of journal blocks already committed are no longer metadata: damage there
            // harms nobody and is not reported. All that is live was.
            println!("clean={clean}: {named} of {} blocks named", blocks.len());
            assert!(named >= 60, "{named} of {}", blocks.len());
        }
    });
}

#[test]
fn damaged_data_is_an_error_for_that_range_alone() {
    run(async {
        let (mut image, bytes) = sample(true).await;
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
