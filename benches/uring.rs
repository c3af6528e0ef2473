//! Random 4 KiB reads and writes on a device at a queue depth of 32, to be held against
//! `fio --ioengine=io_uring --direct=1 --bs=4k --iodepth=32 --rw=randread|randwrite` on the same file.
//!
//! `cargo bench --bench uring -- /path/on/a/disk [seconds]`; the file is created with 2 GiB when missing. A
//! device URI will do as well.

use std::future::poll_fn;
use std::path::Path;
use std::task::Poll;
use std::time::{Duration, Instant};

use rimrock::device::{Device, OpenOptions};
use rimrock::memory::DmaBuf;
use rimrock::reactor::{self, FuturePool, ReactorConfig, Reactors, block_on};

const BLOCK: u64 = 4096;
const DEPTH: usize = 32;

fn main() {
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let uri = match arguments.next() {
        Some(uri) if uri.contains(':') => uri,
        Some(path) if Path::new(&path).exists() => format!("uring:{path}"),
        Some(path) => format!("uring:{path}?size=2GiB"),
        None => return println!("needs the path of a file on a disk, or a device URI"),
    };
    let seconds = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(4);
    let device = Device::open(&uri, OpenOptions::default()).expect("the device opens");
    let reactors = Reactors::start(ReactorConfig::default()).expect("the reactors start");
    let handle = &reactors.handles()[0];
    for write in [false, true] {
        let device = device.clone();
        let before = handle.stats();
        let run = handle.call(move || measure(device, write, Duration::from_secs(seconds)));
        let (count, elapsed, cpu) = block_on(run).expect("the reactor lives");
        let after = handle.stats();
        println!(
            "{} QD{DEPTH}: {:.1}k IOPS, {:.2} us of CPU per I/O, {:.2} enters per I/O, {:.0} % of the time asleep",
            if write { "randwrite" } else { "randread " },
            count as f64 / elapsed.as_secs_f64() / 1e3,
            cpu.as_secs_f64() * 1e6 / count as f64,
            (after.enters - before.enters) as f64 / count as f64,
            (after.idle_ns - before.idle_ns) as f64 / elapsed.as_nanos() as f64 * 100.0,
        );
    }
}

/// I/Os done, wall time, and CPU time of the reactor's thread.
async fn measure(device: Device, write: bool, time: Duration) -> (u64, Duration, Duration) {
    let blocks = device.info().size / BLOCK;
    let mut seed = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed % blocks * BLOCK
    };
    let io = async |offset: u64| {
        match write {
            true => device.write(offset, DmaBuf::uninit(BLOCK as usize).freeze()).await,
            false => device.read(offset, DmaBuf::uninit(BLOCK as usize)).await.0,
        }
        .expect("the I/O succeeds");
    };
    let mut pool = FuturePool::new(DEPTH);
    let (begin, cpu) = (Instant::now(), cpu_time());
    let mut count = 0;
    poll_fn(|cx| {
        let running = reactor::now().saturating_duration_since(begin) < time;
        loop {
            while running && pool.len() < DEPTH {
                pool.start(io(next()));
            }
            match pool.poll_ready(cx) {
                Some(_) => {
                    count += 1;
                    // A device that never waits would otherwise never see the clock move.
                    if count % 1024 == 0 {
                        cx.waker().wake_by_ref();
                        return Poll::Pending;
                    }
                }
                None if pool.is_empty() => return Poll::Ready(()),
                None => return Poll::Pending,
            }
        }
    })
    .await;
    (count, begin.elapsed(), cpu_time() - cpu)
}

fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").expect("the kernel counts CPU time");
    let nanos = stat.split(' ').next().and_then(|word| word.parse().ok()).expect("a number of nanoseconds");
    Duration::from_nanos(nanos)
}
