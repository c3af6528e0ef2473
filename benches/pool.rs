//! What a pool costs on top of its device: CPU time of one reactor per I/O, and the time of snapshots.
//!
//! `cargo bench --bench pool -- [DEVICE-URI] [seconds]`; `ram:2GiB` when no device is given. What the device holds
//! is lost.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use rimrock::device::{Device, OpenOptions};
use rimrock::memory::DmaBuf;
use rimrock::pool::{PoolManager, PoolOptions, Volume, VolumeSpec};
use rimrock::reactor::sync::Event;
use rimrock::reactor::{self, ReactorConfig, Reactors, block_on};

fn main() {
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let uri = arguments.next().unwrap_or_else(|| "ram:2GiB".to_owned());
    let seconds = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(3);
    let device = Device::open(&uri, OpenOptions::default()).expect("the device opens");
    let reactors = Reactors::start(ReactorConfig::default()).expect("the reactors start");
    let handle = reactors.handles()[0].clone();
    let size = device.info().size / 4 >> 20 << 20;
    let manager = PoolManager::new(vec![handle.clone()], 256 << 20);
    block_on(async move {
        let options = PoolOptions { force: true, ..PoolOptions::default() };
        let pool = manager.create("bench", vec![device], options).await.expect("the pool is made");
        let spec = VolumeSpec { name: "v".into(), size, block_size: 4096, write_cache: true, uuid: None };
        pool.volume_create(spec).await.expect("the volume is made");
        let volume = pool.open("v").await.expect("the volume opens");
        let cases = [
            ("write", 1 << 20, 8, false),
            ("write", 1 << 20, 8, false),
            ("read", 1 << 20, 8, false),
            ("write", 4096, 32, true),
            ("read", 4096, 32, true),
            ("write", 4096, 1, true),
            ("read", 4096, 1, true),
        ];
        for (kind, bytes, depth, random) in cases {
            let volume = volume.clone();
            let run =
                move || measure(volume, kind == "write", bytes, depth, random, Duration::from_secs(seconds));
            let (count, wall, cpu) = handle.call(run).await.expect("the reactor lives");
            let order = if random { "random" } else { "in order" };
            println!(
                "{kind:5} {bytes:8} B QD {depth:<3} {order:9} {:9.1} k/s {:8.1} MiB/s {:7.3} us of CPU each",
                count as f64 / wall.as_secs_f64() / 1e3,
                (count * bytes) as f64 / wall.as_secs_f64() / f64::from(1 << 20),
                cpu.as_secs_f64() * 1e6 / count as f64,
            );
        }
        let time =
            |name: &'static str, took: Duration| println!("{name:9} {:7.1} us", took.as_secs_f64() * 1e6);
        for i in 0..5 {
            let start = Instant::now();
            pool.snapshot_create("v", &format!("s{i}")).await.expect("a snapshot");
            time("snapshot", start.elapsed());
            let start = Instant::now();
            pool.clone_create(&format!("s{i}"), &format!("c{i}")).await.expect("a clone");
            time("clone", start.elapsed());
            let start = Instant::now();
            pool.rollback("v", &format!("s{i}"), None).await.expect("a rollback");
            time("rollback", start.elapsed());
        }
        drop(volume);
        manager.export("bench").await.expect("the pool closes");
    });
    reactors.shutdown();
}

/// I/Os done, wall time, and CPU time of the reactor's thread.
async fn measure(
    volume: Volume,
    write: bool,
    bytes: u64,
    depth: usize,
    random: bool,
    time: Duration,
) -> (u64, Duration, Duration) {
    let (start, cpu) = (Instant::now(), thread_time());
    let (done, running, ended) = (Rc::new(Cell::new(0u64)), Rc::new(Cell::new(depth)), Rc::new(Event::new()));
    let next = Rc::new(Cell::new(0x9E37_79B9_7F4A_7C15u64));
    for _ in 0..depth {
        let (volume, done, running) = (volume.clone(), Rc::clone(&done), Rc::clone(&running));
        let (ended, next) = (Rc::clone(&ended), Rc::clone(&next));
        reactor::spawn(async move {
            let units = volume.size() / bytes;
            while start.elapsed() < time {
                let mut at = next.get();
                if random {
                    at ^= at << 13;
                    at ^= at >> 7;
                    at ^= at << 17;
                    next.set(at);
                } else {
                    next.set(at + 1);
                }
                let offset = at % units * bytes;
                if write {
                    let data = DmaBuf::uninit(bytes as usize).freeze();
                    volume.write(offset, data, false).await.expect("a write");
                } else {
                    volume.read(offset, DmaBuf::uninit(bytes as usize)).await.0.expect("a read");
                }
                done.set(done.get() + 1);
                if done.get().is_multiple_of(16) {
                    reactor::yield_now().await;
                }
            }
            running.set(running.get() - 1);
            ended.notify();
        });
    }
    while running.get() > 0 {
        ended.wait().await;
    }
    (done.get(), start.elapsed(), thread_time() - cpu)
}

/// CPU time that this thread has taken.
fn thread_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    Duration::from_nanos(stat.split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(0))
}
