//! Pools on memory, whole: what was acknowledged is there after a clean stop, after a crash, and under any tree of
//! snapshots; and the space adds up.
#![forbid(unsafe_code)]

mod check;
mod decoders;
mod diff;
mod format;
mod full;
mod ghosts;
mod meeting;
mod model;
mod operations;
mod reactors;
mod returns;
mod rot;
mod stale;
mod tree;

use std::rc::Rc;

use crate::device::{Device, OpenOptions};
use crate::memory::DmaBuf;
use crate::pool::{CheckOptions, Pool, PoolManager, PoolOptions, VolumeSpec};
use crate::reactor::block_on;

/// A blank device of `mib` MiB.
fn ram(mib: u64) -> Device {
    Device::open(&format!("ram:{mib}MiB"), OpenOptions::default()).unwrap()
}

/// The devices as they would be found after a power cut now: what was written is there, nothing else.
fn copy_of(devices: &[Device]) -> Vec<Device> {
    devices.iter().map(|device| Device::ram_from_image(&device.image().unwrap(), 4096).unwrap()).collect()
}

fn manager() -> PoolManager {
    PoolManager::new(Vec::new(), 16 << 20)
}

fn spec(name: &str, mib: u64) -> VolumeSpec {
    VolumeSpec { name: name.into(), size: mib << 20, block_size: 4096, write_cache: true, uuid: None }
}

fn run(test: impl Future<Output = ()> + 'static) {
    block_on(test);
}

/// Bytes that tell where and when they were written.
fn pattern(seed: u64, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len);
    for word in 0..len as u64 / 8 {
        let value = (seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (offset + word * 8))
            .wrapping_mul(0xD6E8_FEB8_6659_FD93);
        bytes.extend_from_slice(&value.to_le_bytes());
    }
    bytes
}

async fn write(pool: &Pool, volume: &str, offset: u64, bytes: &[u8]) {
    let volume = pool.open(volume).await.unwrap();
    volume.write(offset, DmaBuf::copy_of(bytes).freeze(), false).await.unwrap();
}

async fn read(pool: &Pool, volume: &str, offset: u64, len: usize) -> Vec<u8> {
    let volume = pool.open(volume).await.unwrap();
    let (result, bytes) = volume.read(offset, DmaBuf::uninit(len)).await;
    result.unwrap();
    bytes.to_vec()
}

async fn assert_sound(pool: &Pool) {
    let report = pool.check(CheckOptions::default()).await.unwrap();
    assert!(report.findings.is_empty(), "{:#?}", report.findings);
}

/// Waits until the background work that deleting calls for is done.
async fn deleted(pool: &Pool) {
    for _ in 0..20_000 {
        for _ in 0..100 {
            crate::reactor::yield_now().await;
        }
        if pool.info().await.unwrap().deleting == 0 {
            return;
        }
    }
    panic!("deleting does not end");
}

/// Random numbers that a seed repeats.
struct Random(u64);

impl Random {
    fn next(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % below.max(1)
    }
}

/// `SEED=n` asks for one world; otherwise a few fixed ones and a fresh one.
fn seeds() -> Vec<u64> {
    match std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()) {
        Some(seed) => vec![seed],
        None => {
            let fresh = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
            vec![1, 2, 3, fresh.as_nanos() as u64]
        }
    }
}

async fn pool_on(devices: &[Device]) -> (Rc<PoolManager>, std::sync::Arc<Pool>) {
    let manager = Rc::new(manager());
    let options = PoolOptions { shards: Some(4), ..PoolOptions::default() };
    let pool = manager.create("p", devices.to_vec(), options).await.unwrap();
    (manager, pool)
}
