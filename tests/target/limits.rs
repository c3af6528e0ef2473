//! What one host can take, and what is left for the others.

use std::time::{Duration, Instant};

use rimrock::memory::{self, ArenaConfig};
use rimrock::target::NamespaceSpec;

use super::client::*;

const SMALL: usize = 48 << 20;
const MIB: u32 = 1 << 20;

/// A rig whose memory for data is as small as it may be.
fn small_rig() -> Rig {
    memory::configure(&ArenaConfig { budget: SMALL, threads: 3, ..ArenaConfig::default() });
    Rig::start()
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// The queues of a host that takes what it can.
fn greedy(rig: &Rig, queues: u16) -> (Wire, Vec<Wire>) {
    let admin = rig.admin();
    let wires = (1..=queues)
        .map(|qid| {
            let mut io = rig.wire();
            io.connect_io(&admin, HOSTNQN, qid, 128).expect_ok();
            io
        })
        .collect();
    (admin, wires)
}

#[test]
fn a_host_that_sends_no_data_leaves_memory_for_others() {
    let rig = small_rig();
    let (_admin, mut queues) = greedy(&rig, 32);
    for io in &mut queues {
        for i in 0..16 {
            io.submit(Sqe::rw(1, 1, i * 256, 255).sgl(TRANSPORT, MIB), &[]);
        }
        io.expect(9);
    }
    rig.check_health();
    assert!(memory::stats().mapped <= SMALL + (4 << 20), "{:?}", memory::stats());
}

#[test]
fn a_host_that_takes_no_answers_leaves_memory_for_others() {
    let rig = small_rig();
    let (_admin, mut queues) = greedy(&rig, 8);
    for io in &mut queues {
        for i in 0..64 {
            io.submit(Sqe::rw(2, 1, i % 8 * 256, 255).sgl(TRANSPORT, MIB), &[]);
        }
    }
    std::thread::sleep(Duration::from_millis(300));
    rig.check_health();
    assert!(memory::stats().mapped <= SMALL + (4 << 20), "{:?}", memory::stats());
    // Whoever begins to read gets all of it.
    for _ in 0..64 {
        assert_eq!(queues[0].complete(&[]).expect_ok().len(), MIB as usize);
    }
}

#[test]
fn a_host_that_fills_its_windows_before_others_join_does_not_keep_them_waiting() {
    let rig = small_rig();
    let admin = rig.admin();
    // Each queue takes what it can get before the next one joins: data it never sends, answers it never takes.
    let queues: Vec<Wire> = (1..=32)
        .map(|qid| {
            let mut io = rig.wire();
            io.connect_io(&admin, HOSTNQN, qid, 128).expect_ok();
            for i in 0..48 {
                let opcode = if i < 24 { 1 } else { 2 };
                io.submit(Sqe::rw(opcode, 1, i % 16 * 256, 255).sgl(TRANSPORT, MIB), &[]);
            }
            std::thread::sleep(Duration::from_millis(10));
            io
        })
        .collect();
    for round in 0..3 {
        let start = Instant::now();
        rig.check_health();
        let (_admin, mut io) = rig.connect_as(&format!("{OTHER_HOST}-{round}"), 128);
        // One of the largest at a time, both ways, and many small ones.
        let data = pattern(MIB as usize, round);
        assert!(io.write(1, 0, &data).ok());
        assert_eq!(io.read(1, 0, MIB).expect_ok(), data);
        for i in 0..100 {
            io.submit(Sqe::rw(2, 1, i, 0).sgl(TRANSPORT, 4096), &[]);
        }
        for _ in 0..100 {
            assert!(io.complete(&[]).ok());
        }
        let took = start.elapsed();
        assert!(took < Duration::from_secs(1), "round {round} took {took:?}");
    }
    assert!(memory::stats().mapped <= SMALL + (4 << 20), "{:?}", memory::stats());
    drop((admin, queues));
    rig.await_connections(0);
}

#[test]
fn many_hosts_with_little_memory_half_of_which_die_are_all_served() {
    let rig = small_rig();
    rig.check_health();
    rig.await_connections(0);
    let files = open_files();
    for round in 0..3 {
        let mut hosts: Vec<_> =
            (0..24).map(|n| rig.connect_as(&format!("nqn.2024-01.org.example:host-{n}"), 32)).collect();
        for (n, (_, io)) in hosts.iter_mut().enumerate() {
            for i in 0..4 {
                let opcode = if n % 2 == 0 { 1 } else { 2 };
                io.submit(Sqe::rw(opcode, 1, i * 256, 255).sgl(TRANSPORT, MIB), &[]);
            }
        }
        // Those that write never send their data, and are gone; those that read are served.
        for (n, (mut admin, mut io)) in hosts.into_iter().enumerate() {
            if n % 2 == 0 {
                io.reset();
                admin.reset();
                continue;
            }
            for _ in 0..4 {
                assert!(io.complete(&[]).ok(), "round {round} host {n}");
            }
        }
        rig.check_health();
    }
    rig.await_connections(0);
    assert!(memory::stats().mapped <= SMALL + (4 << 20), "{:?}", memory::stats());
    let deadline = Instant::now() + Duration::from_secs(5);
    while open_files() > files {
        assert!(Instant::now() < deadline, "{} files, {files} before", open_files());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn an_abort_is_answered_although_its_queue_dies() {
    let rig = Rig::start();
    let mut admin = rig.admin();
    for _ in 0..50 {
        let mut io = rig.wire();
        io.connect_io(&admin, HOSTNQN, 1, 32).expect_ok();
        let cid = io.submit(Sqe::rw(1, 1, 0, 255).sgl(TRANSPORT, MIB), &[]);
        io.expect(9);
        io.reset();
        let abort = Sqe::new(0x08, 0).dword(10, u32::from(cid) << 16 | 1);
        assert!(admin.command(abort, &[]).ok());
    }
    rig.check_health();
}

#[test]
fn the_list_of_changes_survives_a_log_page_command_that_fails() {
    let rig = Rig::start();
    let mut admin = rig.admin();
    let namespace = NamespaceSpec::new(
        rimrock::target::Backend::Device(
            rimrock::device::Device::open("ram:1MiB", rimrock::device::OpenOptions::default()).unwrap(),
        ),
        "second",
    );
    assert_eq!(rig.target.add_namespace(SUBNQN, namespace).unwrap(), 2);
    // Behind the end of the page, and with a buffer that is too small.
    assert!(!admin.log_page(0x04, 4096, 16, false).ok());
    assert_eq!(admin.log_page(0x04, 0, 8, false).expect_ok(), [2, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(admin.log_page(0x04, 0, 8, false).expect_ok(), [0; 8]);
}

#[test]
fn discovery_cannot_be_deleted() {
    let rig = Rig::start();
    let target = rig.target.clone();
    assert!(rimrock::reactor::block_on(async move { target.delete_subsystem(DISCOVERY).await }).is_err());
    rig.wire().connect_admin(DISCOVERY, HOSTNQN).expect_ok();
}

#[test]
fn data_without_an_sgl_and_fused_connects_are_invalid() {
    let rig = Rig::start();
    let (mut admin, mut io) = rig.connect();
    for psdt in [0, 3] {
        let with = |mut sqe: Sqe| {
            sqe.0[1] = psdt << 6;
            sqe
        };
        io.get(with(Sqe::rw(2, 1, 0, 0)), 4096).expect_refused(0x002);
        io.command(with(Sqe::rw(1, 1, 0, 0).sgl(IN_CAPSULE, 4096)), &[0; 4096]).expect_refused(0x002);
        admin.get(with(Sqe::new(IDENTIFY, 0).dword(10, 1)), 4096).expect_refused(0x002);
    }
    let data = Wire::connect_data(0xFFFF, SUBNQN.as_bytes(), HOSTNQN.as_bytes(), HOSTID);
    let mut fused = Wire::connect_sqe(0, 32, 0);
    fused.0[1] |= 1;
    rig.wire().command(fused, &data).expect_refused(0x002);
    rig.check_health();
}

#[test]
fn the_largest_transfers_wait_for_memory_and_none_fails() {
    let rig = small_rig();
    let (_admin, mut queues) = greedy(&rig, 4);
    std::thread::scope(|scope| {
        for (n, io) in queues.iter_mut().enumerate() {
            scope.spawn(move || {
                let data = pattern(MIB as usize, n as u8);
                for opcode in [1, 2] {
                    for i in 0..64 {
                        let slba = (n as u64 * 16 + i % 16) * 256;
                        io.submit(Sqe::rw(opcode, 1, slba, 255).sgl(TRANSPORT, MIB), &[]);
                    }
                    for _ in 0..64 {
                        let got = io.complete(&data).expect_ok();
                        assert!(opcode == 1 || got == data);
                    }
                }
            });
        }
    });
    rig.check_health();
}
