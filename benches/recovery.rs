//! How long a host waits after `kill -9`: from the start of the next process to the first block read over NVMe/TCP.
//!
//! `cargo bench --bench recovery -- [gib=10] [rounds=5] [directory=PATH]`. A pool's file, half as large again, is made
//! in the directory (below `target` by default), written from end to end through the target, then overwritten at random
//! without a flush until the daemon is killed: its journals are as full as they get.

#[path = "common/mod.rs"]
mod common;
#[path = "../tests/daemon/mod.rs"]
mod daemon;

use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use common::{Aim, Figure, Options};
use daemon::Daemon;
use nix::sys::signal::Signal;
use rimrock::host::bench::{self, BenchReport, BenchSpec, Workload};
use serde_json::json;

fn main() {
    let options = Options::read();
    let (gib, rounds) = (options.number("gib", 10), options.number("rounds", 5));
    let directory = options.text("directory", daemon::scratch().to_str().expect("a path"));
    let directory = tempfile::Builder::new().prefix("recovery").tempdir_in(directory).expect("a directory");
    let port = daemon::free_port();
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let uri = format!("uring:{}/pool.img?size={}MiB", directory.path().display(), gib * 1536);
    let mut daemon = Daemon::start_with(Some(&format!(
        "[reactor]\ncores = \"0\"\n[target]\nlisten = \"{address}\"\n[[pool]]\nname = \"bench\"\ndevices = [\"{uri}\"]\ncreate = true\n"
    )));
    daemon.call("volume_create", json!({ "name": "v", "size": gib << 30 }));
    let exported = daemon.call("volume_export", json!({ "name": "v" }));
    let nqn = exported["nqn"].as_str().expect("an NQN").to_owned();
    let started = Instant::now();
    fill(address, &nqn, gib << 30);
    println!("{gib} GiB written in {:.0} s", started.elapsed().as_secs_f64());
    let mut figure = Figure::default();
    for round in 0..rounds {
        let nqn = nqn.clone();
        let load_nqn = nqn.clone();
        let load = std::thread::spawn(move || {
            measure(address, &load_nqn, Workload::RAND_WRITE, 4096, 32, Duration::from_secs(60), None)
        });
        // Not the same point between two commits each time.
        std::thread::sleep(Duration::from_millis(3000 + 450 * round));
        daemon.signal(Signal::SIGKILL);
        let _ = load.join();
        let started = Instant::now();
        daemon.restart();
        let answered = started.elapsed();
        let traffic = daemon.call("device_list", json!({}))[0]["traffic"].clone();
        while TcpStream::connect(address).is_err() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let read =
            measure(address, &nqn, Workload::RAND_READ, 4096, 1, Duration::from_micros(1), Some(gib << 30));
        read.expect("the first read");
        let served = started.elapsed();
        println!(
            "  the socket answers after {:.0} ms, a host has read after {:.0} ms; by then {} reads of {} MiB, {} writes of \
             {} MiB, {} flushes",
            answered.as_secs_f64() * 1e3,
            served.as_secs_f64() * 1e3,
            traffic["reads"],
            traffic["read_bytes"].as_u64().unwrap_or(0) >> 20,
            traffic["writes"],
            traffic["written_bytes"].as_u64().unwrap_or(0) >> 20,
            traffic["flushes"],
        );
        figure.add(served.as_secs_f64());
    }
    figure.judge(
        &format!("seconds from the start after kill -9 to the first read, {gib} GiB mapped"),
        Aim::AtMost(1.0),
    );
}

fn measure(
    address: SocketAddr,
    nqn: &str,
    workload: Workload,
    bytes: usize,
    depth: u16,
    duration: Duration,
    range: Option<u64>,
) -> Result<BenchReport, bench::BenchError> {
    let mut spec = BenchSpec::new(address, nqn);
    spec.workload = workload;
    spec.block_bytes = bytes;
    spec.queue_depth = depth;
    spec.duration = duration;
    spec.range_bytes = range;
    bench::run(spec)
}

/// Writes that much, from the beginning.
fn fill(address: SocketAddr, nqn: &str, bytes: u64) {
    let (mut written, mut seconds) = (0, 20);
    while written < bytes {
        // Each run begins at the first byte: what is written must fit one.
        let run =
            measure(address, nqn, Workload::WRITE, 1 << 20, 8, Duration::from_secs(seconds), Some(bytes));
        written = run.expect("the target answers").total.bytes;
        seconds *= 2;
    }
}
