//! Hosts that are none: they connect by the hundred and say nothing, or nonsense, and hear nothing. An honest host works
//! on meanwhile; afterwards memory, file descriptors and the rest of the reactors are what they were.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use nix::sys::socket::{setsockopt, sockopt};
use rimrock::memory::{self, ArenaConfig};

use super::client::*;

const MIB: usize = 1 << 20;
const BUDGET: usize = 48 * MIB;
/// As long as a connection may stay that does not become a queue, and the time to see it.
const CONNECT_LIMIT: Duration = Duration::from_secs(30);
const SLACK: Duration = Duration::from_secs(15);

/// What must come back to where it was.
#[derive(Debug, Clone, Copy)]
struct Use {
    files: usize,
    /// Resident memory of the process, bytes.
    resident: usize,
    /// Memory of buffers that is not free, bytes.
    buffers: usize,
    /// Turns of the reactors in a quiet moment.
    turns: u64,
}

impl Use {
    fn of(rig: &Rig) -> Use {
        let turns = || rig.reactors().iter().map(|reactor| reactor.stats().loops).sum::<u64>();
        let before = turns();
        std::thread::sleep(Duration::from_millis(300));
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: usize = statm.split(' ').nth(1).unwrap().parse().unwrap();
        let stats = memory::stats();
        Use {
            files: std::fs::read_dir("/proc/self/fd").unwrap().count(),
            resident: pages * 4096,
            buffers: stats.mapped - stats.empty,
            turns: turns() - before,
        }
    }

    /// Waits until nothing is held, and no more is used than before but for what lies ready to be used again.
    fn await_baseline(rig: &Rig, before: Use) {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let now = Use::of(rig);
            let is_back = rig.target.bytes_held() == 0
                && now.files <= before.files
                && now.resident <= before.resident + 8 * MIB
                && now.buffers <= before.buffers + BUDGET / 4
                && now.turns <= before.turns + 100;
            if is_back {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "{now:?}, {} held; {before:?} before",
                rig.target.bytes_held()
            );
        }
    }
}

fn rig() -> Rig {
    memory::configure(&ArenaConfig { budget: BUDGET, threads: 3, ..ArenaConfig::default() });
    Rig::start()
}

/// How many connections are tried at once; each takes two files of this process.
fn crowd() -> usize {
    let (soft, _) = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE).unwrap();
    (soft as usize).saturating_sub(200).min(2000) / 2
}

/// An honest host's work: it must not be slow.
fn work(io: &mut Wire, seed: u8) {
    let start = Instant::now();
    let data = pattern(64 << 10, seed);
    assert!(io.write(1, 0, &data).ok());
    assert_eq!(io.read(1, 0, 64 << 10).expect_ok(), data);
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
}

fn reset(stream: TcpStream) {
    setsockopt(&stream, sockopt::Linger, &libc::linger { l_onoff: 1, l_linger: 0 }).unwrap();
}

fn noise(seed: &mut u64) -> [u8; 128] {
    std::array::from_fn(|_| {
        *seed ^= *seed << 13;
        *seed ^= *seed >> 7;
        *seed ^= *seed << 17;
        (*seed >> 24) as u8
    })
}

#[test]
fn a_thousand_scanners_that_send_noise_and_reset_leave_nothing_behind() {
    let rig = rig();
    let (_admin, mut io) = rig.connect();
    work(&mut io, 0);
    let mut seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0x5EED_u64) | 1;
    println!("SEED={seed}");
    let mut before = None;
    // The first round brings what is kept to be used again.
    for round in 0..3 {
        let scanners: Vec<TcpStream> = (0..crowd())
            .map(|n| {
                let mut scanner = TcpStream::connect(rig.addr).unwrap();
                scanner.write_all(&noise(&mut seed)).unwrap();
                // Nothing that is sent to it arrives.
                let _ = scanner.shutdown(Shutdown::Read);
                if n % 50 == 0 {
                    work(&mut io, n as u8);
                }
                scanner
            })
            .collect();
        std::thread::sleep(Duration::from_millis(10));
        scanners.into_iter().for_each(reset);
        work(&mut io, 1);
        rig.await_connections(2);
        match before {
            None => before = Some(Use::of(&rig)),
            Some(before) => Use::await_baseline(&rig, before),
        }
        println!("round {round}: {before:?}");
    }
    rig.check_health();
}

#[test]
fn scanners_that_say_nothing_are_cut_when_their_time_is_up() {
    let rig = rig();
    let (_admin, mut io) = rig.connect();
    work(&mut io, 0);
    let before = Use::of(&rig);
    let start = Instant::now();
    // Silent; in the middle of their first PDU; greeted, and silent from then on.
    let mut scanners: Vec<TcpStream> = (0..crowd())
        .map(|n| {
            let mut scanner = TcpStream::connect(rig.addr).unwrap();
            scanner.set_read_timeout(Some(CONNECT_LIMIT + SLACK)).unwrap();
            match n % 3 {
                0 => {}
                1 => scanner.write_all(&Wire::ic_req(0, 0)[..100]).unwrap(),
                _ => scanner.write_all(&Wire::ic_req(0, 0)).unwrap(),
            }
            scanner
        })
        .collect();
    rig.await_connections(2 + scanners.len() as u32);
    assert_eq!(rig.target.bytes_held(), 0);
    let crowded = Use::of(&rig);
    let each = crowded.resident.saturating_sub(before.resident) / scanners.len();
    assert!(each < 32 << 10, "{each} bytes for a connection that says nothing");
    assert!(crowded.turns <= before.turns + 100, "{crowded:?}, {before:?} before");
    while start.elapsed() < CONNECT_LIMIT - Duration::from_secs(1) {
        work(&mut io, 1);
        std::thread::sleep(Duration::from_millis(200));
    }
    assert_eq!(rig.target.connection_count(), 2 + scanners.len() as u32, "none is cut before its time");
    for scanner in &mut scanners {
        // The answer to ICReq, if any, and the end.
        let _ = scanner.read_to_end(&mut Vec::new());
    }
    assert!(start.elapsed() < CONNECT_LIMIT + SLACK, "{:?}", start.elapsed());
    rig.await_connections(2);
    drop(scanners);
    Use::await_baseline(&rig, before);
    rig.check_health();
}

#[test]
fn hosts_that_cannot_be_told_why_they_are_cut_are_cut_all_the_same() {
    let rig = rig();
    let (_admin, mut io) = rig.connect_as(OTHER_HOST, 32);
    work(&mut io, 0);
    let mut before = None;
    for _ in 0..3 {
        let admin = rig.admin();
        let mut hosts: Vec<Wire> = (1..=64).map(|_| rig.wire()).collect();
        for (qid, host) in (1..).zip(&mut hosts) {
            host.connect_io(&admin, HOSTNQN, qid, 32).expect_ok();
            // Its window is closed by answers that it does not read; then it breaks the protocol.
            for i in 0..16 {
                host.submit(Sqe::rw(2, 1, i * 256, 255).sgl(TRANSPORT, MIB as u32), &[]);
            }
            if qid % 2 == 0 {
                host.submit(Sqe::rw(1, 1, 0, 255).sgl(TRANSPORT, MIB as u32), &[]);
            }
        }
        std::thread::sleep(Duration::from_millis(200));
        work(&mut io, 1);
        for host in &mut hosts {
            host.send(&[0xEE; 128]);
        }
        let start = Instant::now();
        // This host's admin queue, and the honest host.
        while rig.target.connection_count() > 3 {
            assert!(start.elapsed() < SLACK, "{} connections", rig.target.connection_count());
            work(&mut io, 2);
        }
        drop((admin, hosts));
        rig.await_connections(2);
        match before {
            None => before = Some(Use::of(&rig)),
            Some(before) => Use::await_baseline(&rig, before),
        }
    }
    rig.check_health();
}
