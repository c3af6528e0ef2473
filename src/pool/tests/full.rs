//! What happens when something runs out: data blocks, metadata blocks, the catalog. Nothing acknowledged is lost, deleting
//! always works, and the pool can always be imported.
#![forbid(unsafe_code)]

use super::*;
use crate::device::IoError;
use crate::pool::PoolErrorKind;

/// Fills a volume with pieces of 256 KiB until the pool is full. Bytes written.
async fn fill(pool: &Pool, volume: &str, seed: u64) -> u64 {
    let v = pool.open(volume).await.unwrap();
    let mut at = 0;
    loop {
        let data = DmaBuf::copy_of(&pattern(seed, at, 256 << 10)).freeze();
        match v.write(at, data, false).await {
            Ok(()) => at += 256 << 10,
            Err(error) => {
                assert_eq!(error, IoError::CapacityExceeded);
                return at;
            }
        }
    }
}

#[test]
fn a_full_pool_refuses_new_data_and_recovers() {
    run(async {
        let (_manager, pool) = pool_on(&[ram(64)]).await;
        pool.volume_create(spec("v", 512)).await.unwrap();
        let v = pool.open("v").await.unwrap();
        for round in 0..5u64 {
            let at = fill(&pool, "v", round).await;
            assert!(at > 30 << 20, "round {round}: only {at} bytes went in");
            for offset in (0..at).step_by(256 << 10) {
                assert_eq!(read(&pool, "v", offset, 256 << 10).await, pattern(round, offset, 256 << 10));
            }
            v.deallocate(0, 512 << 20).await.unwrap();
            v.flush().await.unwrap();
            assert_sound(&pool).await;
        }
        assert_eq!(pool.info().await.unwrap().allocated, 0);
    });
}

#[test]
fn in_a_full_pool_overwrites_of_any_length_and_number_go_on() {
    run(async {
        let (_manager, pool) = pool_on(&[ram(64)]).await;
        pool.volume_create(spec("v", 512)).await.unwrap();
        let v = pool.open("v").await.unwrap();
        fill(&pool, "v", 1).await;
        // Longer than a shard's reserve, and many more at once than it has blocks.
        for (seed, len, step) in [(2, 1 << 20, 1 << 20), (3, 4096, 32 << 10), (4, 64 << 10, 64 << 10)] {
            let writes = (0..16u64 << 20).step_by(step).map(|at| {
                let data = DmaBuf::copy_of(&pattern(seed, at, len)).freeze();
                v.write(at, data, false)
            });
            for result in crate::pool::join::all(writes).await {
                result.unwrap();
            }
            for at in (0..16u64 << 20).step_by(step) {
                assert_eq!(read(&pool, "v", at, len).await, pattern(seed, at, len));
            }
        }
        // What a snapshot shares cannot be overwritten for nothing.
        pool.snapshot_create("v", "s").await.unwrap();
        let data = DmaBuf::copy_of(&pattern(5, 0, 1 << 20)).freeze();
        let mut refused = false;
        for at in 0..16 {
            refused |= v.write(at << 20, data.clone(), false).await == Err(IoError::CapacityExceeded);
        }
        assert!(refused);
        pool.delete("s").await.unwrap();
        deleted(&pool).await;
        v.write(0, data, true).await.unwrap();
        assert_sound(&pool).await;
    });
}

#[test]
fn without_metadata_space_trims_deletes_commits_and_imports_still_work() {
    run(async {
        let devices = [ram(64)];
        let (manager, pool) = pool_on(&devices).await;
        let mut first = 0;
        for round in 0..6 {
            // One block in each chunk: a page of the map for each block of data.
            pool.volume_create(spec("v", 1 << 20)).await.unwrap();
            pool.volume_create(spec("w", 1 << 20)).await.unwrap();
            let v = pool.open("v").await.unwrap();
            let w = pool.open("w").await.unwrap();
            let mut written = 0u64;
            'fill: for volume in [&v, &w] {
                for chunk in 0..1u64 << 20 {
                    let data = DmaBuf::copy_of(&pattern(round, chunk, 4096)).freeze();
                    match volume.write(chunk << 20, data, false).await {
                        Ok(()) => written += 1,
                        Err(error) => {
                            assert_eq!(error, IoError::CapacityExceeded);
                            break 'fill;
                        }
                    }
                }
            }
            // Regions that were dealt out for data come back only by and by.
            first = if round == 0 { written } else { first };
            assert!(written > 2000 && written > first / 3 * 2, "round {round}: {written} of {first}");
            v.flush().await.unwrap();
            assert_sound(&pool).await;
            // A power cut now.
            let after = self::manager();
            let copy = after.import(copy_of(&devices)).await.unwrap();
            for chunk in (0..written).step_by(97) {
                assert_eq!(read(&copy, "v", chunk << 20, 4096).await, pattern(round, chunk, 4096));
            }
            assert_sound(&copy).await;
            v.deallocate(0, 100 << 20).await.unwrap();
            v.flush().await.unwrap();
            drop((v, w));
            pool.snapshot_create("w", "s").await.unwrap();
            for name in ["s", "v", "w"] {
                pool.delete(name).await.unwrap();
            }
            deleted(&pool).await;
            assert_sound(&pool).await;
            assert_eq!(pool.info().await.unwrap().allocated, 0);
        }
        manager.export("p").await.unwrap();
    });
}

#[test]
fn a_full_catalog_refuses_what_is_new_and_nothing_else() {
    run(async {
        let devices = [ram(64)];
        let (manager, pool) = pool_on(&devices).await;
        pool.volume_create(spec("v", 4)).await.unwrap();
        write(&pool, "v", 0, &pattern(1, 0, 1 << 20)).await;
        let mut made = 0;
        let error = loop {
            match pool.snapshot_create("v", &format!("s{made}")).await {
                Ok(_) => made += 1,
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind, PoolErrorKind::NoSpace, "{error}");
        assert!(error.text.contains("delete"), "{error}");
        assert!(made > 1000, "{made}");
        assert_eq!(pool.clone_create("s1", "c").await.unwrap_err().kind, PoolErrorKind::NoSpace);
        // What was refused has left nothing behind.
        assert_eq!(pool.info().await.unwrap().snapshots, made);
        assert!(pool.node("c").await.is_err() && pool.node(&format!("s{made}")).await.is_err());
        write(&pool, "v", 0, &pattern(2, 0, 1 << 20)).await;
        pool.open("v").await.unwrap().flush().await.unwrap();
        manager.export("p").await.unwrap();
        let mut pool = manager.import(devices.to_vec()).await.unwrap();
        // Any number of imports later as well.
        for _ in 0..3 {
            for _ in 0..8 {
                let copy = self::manager();
                copy.import(copy_of(&devices)).await.unwrap();
                copy.export("p").await.unwrap();
            }
            manager.export("p").await.unwrap();
            pool = manager.import(devices.to_vec()).await.unwrap();
        }
        assert_eq!(pool.info().await.unwrap().snapshots, made);
        assert_eq!(read(&pool, "s0", 0, 1 << 20).await, pattern(1, 0, 1 << 20));
        for i in 0..100 {
            pool.delete(&format!("s{i}")).await.unwrap();
        }
        deleted(&pool).await;
        pool.clone_create("s100", "c").await.unwrap();
        assert_eq!(read(&pool, "c", 0, 1 << 20).await, pattern(1, 0, 1 << 20));
        assert_eq!(read(&pool, "v", 0, 1 << 20).await, pattern(2, 0, 1 << 20));
        assert_sound(&pool).await;
    });
}

#[test]
fn filled_and_emptied_a_hundred_times_a_pool_loses_no_block() {
    run(async {
        let devices = [ram(64)];
        let manager = Rc::new(manager());
        let options = PoolOptions { shards: Some(2), ..PoolOptions::default() };
        let pool = manager.create("p", devices.to_vec(), options).await.unwrap();
        let mut free = Vec::new();
        for round in 0..100u64 {
            // Filled to the brim, with a snapshot and a clone on the way, and emptied in one of several ways.
            pool.volume_create(spec("v", 512)).await.unwrap();
            let first = pattern(round, 0, 4 << 20);
            write(&pool, "v", 0, &first).await;
            pool.snapshot_create("v", "s").await.unwrap();
            pool.clone_create("s", "c").await.unwrap();
            let written = fill(&pool, if round % 2 == 0 { "v" } else { "c" }, round).await;
            assert!(written > 30 << 20, "round {round}: only {written} bytes went in");
            assert_eq!(read(&pool, "s", 0, 4 << 20).await, first);
            if round % 3 == 0 {
                pool.open("v").await.unwrap().deallocate(0, 512 << 20).await.unwrap();
            }
            for name in [["s", "v", "c"], ["c", "s", "v"], ["v", "c", "s"]][round as usize % 3] {
                pool.delete(name).await.unwrap();
            }
            deleted(&pool).await;
            assert_sound(&pool).await;
            let info = pool.info().await.unwrap();
            assert_eq!((info.allocated, info.pending_free, pool.records_left()), (0, 0, 0), "round {round}");
            free.push(info.free);
        }
        // Metadata may take a region for good in the beginning; from then on everything comes back.
        assert_eq!(free[10], free[99], "{free:?}");
        assert!(free[99] + (8 << 20) >= free[0]);
    });
}
