//! Pools on real reactors and a real file: shards on two cores, snapshots under load, a copy of the file taken as a
//! crash would leave it.
#![forbid(unsafe_code)]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::*;
use crate::device::{IoError, OpenOptions};
use crate::pool::Volume;
use crate::reactor::{PollMode, ReactorConfig, Reactors};

/// Two, where there are two cores.
fn reactors() -> Reactors {
    let cores = (0..std::thread::available_parallelism().map_or(1, |cores| cores.get().min(2))).collect();
    Reactors::start(ReactorConfig { cores, poll: PollMode::Adaptive, ..ReactorConfig::default() }).unwrap()
}

fn file(dir: &Path, mib: u64) -> Device {
    let uri = format!("uring:{}?size={mib}MiB", dir.join("pool.img").display());
    Device::open(&uri, OpenOptions::default()).unwrap()
}

fn scratch() -> tempfile::TempDir {
    // Beside the build, where there is a real filesystem.
    tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR").to_owned() + "/target").unwrap()
}

/// Each 4 KiB block holds how often it was written and where it lies.
fn stamped(block: u64, count: u64) -> Vec<u8> {
    let mut bytes = pattern(count, block * 4096, 4096);
    bytes[..8].copy_from_slice(&block.to_le_bytes());
    bytes[8..16].copy_from_slice(&count.to_le_bytes());
    bytes
}

fn stamp(bytes: &[u8], block: u64) -> u64 {
    let count = u64::from_le_bytes(bytes[8..16].try_into().unwrap());
    let expected = if count == 0 { vec![0; 4096] } else { stamped(block, count) };
    assert!(bytes == expected, "block {block} is not whole");
    count
}

const BLOCKS: u64 = 2048;

/// Writes blocks one after another, round and round; `acked` counts the writes acknowledged.
async fn writer(volume: Volume, acked: Arc<AtomicU64>, stop: Arc<AtomicBool>) {
    let mut n = 0u64;
    while !stop.load(Ordering::Relaxed) {
        let (block, count) = (n % BLOCKS, n / BLOCKS + 1);
        let data = DmaBuf::copy_of(&stamped(block, count)).freeze();
        match volume.write(block * 4096, data, false).await {
            Ok(()) => {}
            // A shard's reactor ended first: that is the crash.
            Err(IoError::Gone) => return,
            Err(error) => panic!("{error}"),
        }
        n += 1;
        acked.store(n, Ordering::SeqCst);
    }
}

async fn counts(pool: &Pool, handle: &crate::reactor::ReactorHandle, name: &str) -> Vec<u64> {
    let volume = pool.open(name).await.unwrap();
    let read = move || async move {
        let (result, bytes) = volume.read(0, DmaBuf::uninit(BLOCKS as usize * 4096)).await;
        result.unwrap();
        bytes.to_vec()
    };
    let bytes = handle.call(read).await.unwrap();
    bytes.chunks(4096).enumerate().map(|(block, bytes)| stamp(bytes, block as u64)).collect()
}

/// How often `block` is written by the first `n` writes.
fn writes_of(block: u64, n: u64) -> u64 {
    n / BLOCKS + u64::from(block < n % BLOCKS)
}

/// The writes that a state holds must be the first n of the writer's, with `low <= n <= high`.
fn assert_prefix(counts: &[u64], low: u64, high: u64) {
    let n: u64 = counts.iter().sum();
    for (block, count) in counts.iter().enumerate() {
        let expected = writes_of(block as u64, n);
        assert_eq!(*count, expected, "block {block} of a state of {n} writes");
    }
    assert!((low..=high).contains(&n), "{n} writes, not {low} to {high}");
}

#[test]
fn snapshots_under_load_over_two_reactors_are_prefixes_and_survive_a_crash() {
    let dir = scratch();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let first = reactors();
    let handles = first.handles().to_vec();
    let last = handles.len() - 1;
    let (bounds, acked) = runtime.block_on(async {
        let manager = PoolManager::new(handles.clone(), 16 << 20);
        let pool = manager.create("p", vec![file(dir.path(), 512)], PoolOptions::default()).await.unwrap();
        pool.volume_create(spec("v", 16)).await.unwrap();
        let (acked, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let volume = pool.open("v").await.unwrap();
        let (a, s) = (Arc::clone(&acked), Arc::clone(&stop));
        let writing = handles[last].call(move || writer(volume, a, s));
        let mut bounds = Vec::new();
        for i in 0..20 {
            tokio::time::sleep(std::time::Duration::from_millis(15)).await;
            let low = acked.load(Ordering::SeqCst);
            pool.snapshot_create("v", &format!("v@{i}")).await.unwrap();
            // One write may be on its way to being acknowledged.
            bounds.push((low, acked.load(Ordering::SeqCst) + 1));
        }
        stop.store(true, Ordering::Relaxed);
        writing.await.unwrap();
        for (i, (low, high)) in bounds.iter().enumerate() {
            assert_prefix(&counts(&pool, &handles[0], &format!("v@{i}")).await, *low, *high);
        }
        assert_sound(&pool).await;
        // And on into the crash: the reactors end in the middle of this. What is acknowledged after the snapshot is
        // not flushed by anyone.
        let (volume, acked) = (pool.open("v").await.unwrap(), Arc::<AtomicU64>::default());
        let a = Arc::clone(&acked);
        handles[last].spawn(move || writer(volume, a, Arc::default()));
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        pool.snapshot_create("v", "v@last").await.unwrap();
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        (bounds, acked)
    });
    first.shutdown();
    let second = reactors();
    let handles = second.handles().to_vec();
    runtime.block_on(async {
        let manager = PoolManager::new(handles.clone(), 16 << 20);
        let device =
            Device::open(&format!("uring:{}", dir.path().join("pool.img").display()), OpenOptions::default());
        let pool = manager.import(vec![device.unwrap()]).await.unwrap();
        for (i, (low, high)) in bounds.iter().enumerate() {
            assert_prefix(&counts(&pool, &handles[last], &format!("v@{i}")).await, *low, *high);
        }
        counts(&pool, &handles[0], "v@last").await;
        // The writer began anew over what was there: of each block it wrote, at least the last acknowledged count.
        let acked = acked.load(Ordering::SeqCst);
        assert!(acked > 0);
        for (block, count) in counts(&pool, &handles[0], "v").await.into_iter().enumerate() {
            let block = block as u64;
            let (low, high) = (writes_of(block, acked), writes_of(block, acked + 1));
            assert!(low == 0 || (low..=high).contains(&count), "block {block}: {count}, not {low} to {high}");
        }
        assert_sound(&pool).await;
        assert_eq!(pool.info().await.unwrap().damage, Vec::<String>::new());
        manager.export("p").await.unwrap();
    });
    second.shutdown();
}
