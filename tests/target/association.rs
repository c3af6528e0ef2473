//! Associations at their edges: identities, reconnects in the middle of work, resets and shutdowns under load, keep alive
//! when everything else is busy, and what becomes of hosts whose subsystem, permission or device goes away.

use std::time::{Duration, Instant};

use rimrock::device::{Device, OpenOptions};
use rimrock::memory::{self, ArenaConfig};
use rimrock::pool::{PoolManager, PoolOptions, VolumeSpec};
use rimrock::reactor::block_on;
use rimrock::target::{Backend, NamespaceSpec, SubsystemSpec};

use super::client::*;

const INVALID_PARAMETERS: u16 = 0x182;
const INVALID_HOST: u16 = 0x184;
const CONTROLLER_BUSY: u16 = 0x181;
const SEQUENCE: u16 = 0x00C;
const ABORTED_SQ_DELETION: u16 = 0x008;
const ID_CONFLICT: u16 = 0x003;
/// Dword 0 of a refusal: the parameter is in the data, at this offset.
const CNTLID_AT: u64 = 1 << 16 | 16;
const SUBNQN_AT: u64 = 1 << 16 | 256;
const HOSTNQN_AT: u64 = 1 << 16 | 512;
const OTHER_SUBSYSTEM: &str = "nqn.2024-01.io.rimrock:second";
const MIB: u32 = 1 << 20;

fn try_connect(rig: &Rig, qid: u16, cntlid: u16, subnqn: &str, host: &str) -> Completion {
    let data = Wire::connect_data(cntlid, subnqn.as_bytes(), host.as_bytes(), HOSTID);
    rig.wire().command(Wire::connect_sqe(qid, 32, 0), &data)
}

fn add_subsystem(rig: &Rig, spec: SubsystemSpec) {
    let nqn = spec.nqn.clone();
    rig.target.create_subsystem(SubsystemSpec { allow_any_host: true, ..spec }).unwrap();
    rig.ask(|target, addr| async move { target.add_listener(&nqn, addr).await });
}

/// Writes that wait for their data, and reads whose answers are not taken yet.
fn load(io: &mut Wire, commands: u64) {
    for i in 0..commands {
        let opcode = 1 + (i % 2) as u8;
        io.submit(Sqe::rw(opcode, 1, i % 16 * 256, 255).sgl(TRANSPORT, MIB), &[]);
    }
}

/// Polls CSTS until `is_done`, and returns every value that was seen.
fn await_status(admin: &mut Wire, is_done: impl Fn(u64) -> bool) -> Vec<u64> {
    let deadline = Instant::now() + Duration::from_secs(5);
    let mut seen = Vec::new();
    loop {
        let csts = admin.property_get(0x1C, false).result;
        seen.push(csts);
        if is_done(csts) {
            return seen;
        }
        assert!(Instant::now() < deadline, "CSTS stays {csts:#x}");
    }
}

// ---- identities ----------------------------------------------------------------------------------------------------

#[test]
fn a_name_that_is_wrong_is_never_worth_a_retry_and_the_longest_one_works() {
    let rig = Rig::start();
    let long = |len: usize| format!("nqn.2024-01.io.rimrock:{}", "x".repeat(len - 23));
    for name in ["", "nqn", "nqn.", "10.0.0.1", "nqn.2024-01.io.rimrock:a b", &long(224), &long(255)] {
        for (subnqn, host, at) in [(SUBNQN, name, HOSTNQN_AT), (name, HOSTNQN, SUBNQN_AT)] {
            for qid in [0, 1] {
                let refused = try_connect(&rig, qid, 0xFFFF, subnqn, host);
                assert_eq!(refused.result, at, "{name:?} on queue {qid}");
                refused.expect_refused(INVALID_PARAMETERS);
            }
        }
    }
    let longest = long(223);
    add_subsystem(&rig, SubsystemSpec::new(&longest));
    try_connect(&rig, 0, 0xFFFF, &longest, &long(223)).expect_ok();
    rig.check_health();
}

#[test]
fn a_host_identifier_of_zero_makes_an_association_that_other_identifiers_cannot_join() {
    let rig = Rig::start();
    let mut admin = rig.wire();
    let data = Wire::connect_data(0xFFFF, SUBNQN.as_bytes(), HOSTNQN.as_bytes(), [0; 16]);
    let connected = admin.command(Wire::connect_sqe(0, 32, 0), &data);
    admin.cntlid = connected.result as u16;
    connected.expect_ok();
    admin.enable();
    // The rig's own identifier is another one.
    let refused = rig.wire().connect_io(&admin, HOSTNQN, 1, 32);
    assert_eq!((refused.code(), refused.result), (INVALID_PARAMETERS, 1 << 16));
    let data = Wire::connect_data(admin.cntlid, SUBNQN.as_bytes(), HOSTNQN.as_bytes(), [0; 16]);
    let mut io = rig.wire();
    io.command(Wire::connect_sqe(1, 32, 0), &data).expect_ok();
    assert!(io.read(1, 0, 4096).ok());
    rig.check_health();
}

#[test]
fn controllers_are_counted_per_subsystem_and_unique_across_its_addresses() {
    let rig = Rig::start();
    let spec =
        SubsystemSpec { min_cntlid: 0xFFEE, max_cntlid: 0xFFEF, ..SubsystemSpec::new(OTHER_SUBSYSTEM) };
    add_subsystem(&rig, spec);
    let second = listen(&rig.target, OTHER_SUBSYSTEM);
    let mut held = Vec::new();
    for addr in [rig.addr, second] {
        let mut wire = Wire::open(addr);
        wire.handshake();
        wire.connect_admin(OTHER_SUBSYSTEM, HOSTNQN).expect_ok();
        wire.enable();
        held.push(wire);
    }
    let mut ids: Vec<u16> = held.iter().map(|wire| wire.cntlid).collect();
    ids.sort_unstable();
    assert_eq!(ids, [0xFFEE, 0xFFEF]);
    // No more than that: the host may come back when one has gone.
    let full = try_connect(&rig, 0, 0xFFFF, OTHER_SUBSYSTEM, HOSTNQN);
    assert_eq!((full.code(), full.dnr()), (CONTROLLER_BUSY, false));
    // The other subsystem's controllers are unknown here, and the other way round.
    let mut admin = rig.admin();
    for (cntlid, subnqn) in [(0xFFEE, SUBNQN), (admin.cntlid, OTHER_SUBSYSTEM)] {
        let foreign = try_connect(&rig, 1, cntlid, subnqn, HOSTNQN);
        assert_eq!((foreign.code(), foreign.result), (INVALID_PARAMETERS, CNTLID_AT));
    }
    let gone = held.pop().unwrap();
    let cntlid = gone.cntlid;
    drop(gone);
    rig.await_connections(2);
    assert_eq!(try_connect(&rig, 0, 0xFFFF, OTHER_SUBSYSTEM, HOSTNQN).result, u64::from(cntlid));
    assert!(admin.identify(1, 0).ok());
    rig.check_health();
}

// ---- queues --------------------------------------------------------------------------------------------------------

#[test]
fn queue_ids_end_where_the_host_was_told_they_do() {
    let rig = Rig::start();
    let mut admin = rig.admin();
    assert_eq!(admin.set_feature(0x07, 0x0003_0003).result, 0x0003_0003, "four of each");
    for qid in [5, 128, 65535] {
        let refused = try_connect(&rig, qid, admin.cntlid, SUBNQN, HOSTNQN);
        assert_eq!(refused.result, 42, "QID {qid} at its place in the command");
        refused.expect_refused(INVALID_PARAMETERS);
    }
    assert!(try_connect(&rig, 4, admin.cntlid, SUBNQN, HOSTNQN).ok());
    rig.check_health();
}

#[test]
fn of_many_connects_for_one_queue_exactly_one_wins() {
    let rig = Rig::start();
    let admin = rig.admin();
    for _ in 0..5 {
        let wires: Vec<Wire> = (0..8).map(|_| rig.wire()).collect();
        let outcomes: Vec<(Wire, Completion)> = std::thread::scope(|scope| {
            let connect = |mut wire: Wire| {
                let completion = wire.connect_io(&admin, HOSTNQN, 1, 32);
                (wire, completion)
            };
            let threads: Vec<_> = wires.into_iter().map(|wire| scope.spawn(move || connect(wire))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let (won, lost): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(|(_, outcome)| outcome.ok());
        assert_eq!((won.len(), lost.len()), (1, 7));
        for (_, outcome) in &lost {
            assert_eq!((outcome.code(), outcome.dnr()), (SEQUENCE, false));
        }
        for (mut io, _) in won {
            assert!(io.read(1, 0, 4096).ok());
            io.reset();
        }
    }
    rig.check_health();
}

#[test]
fn a_connect_that_waits_for_an_old_queue_is_answered_when_the_controller_goes() {
    let rig = Rig::start();
    let (admin, _io) = rig.connect();
    let mut waiting = rig.wire();
    let data = Wire::connect_data(admin.cntlid, SUBNQN.as_bytes(), HOSTNQN.as_bytes(), HOSTID);
    waiting.submit(Wire::connect_sqe(1, 32, 0), &data);
    std::thread::sleep(Duration::from_millis(50));
    drop(admin);
    let refused = waiting.complete(&[]);
    assert_eq!((refused.code(), refused.result, refused.dnr()), (INVALID_PARAMETERS, CNTLID_AT, false));
    rig.check_health();
}

#[test]
fn queues_cut_in_the_middle_of_work_come_back_at_once() {
    let rig = Rig::start();
    let (mut admin, mut io) = rig.connect();
    for round in 0..60 {
        load(&mut io, 16);
        io.reset();
        if round % 4 == 3 {
            admin.reset();
            admin = rig.admin();
        }
        io = rig.wire();
        let completion = io.connect_io(&admin, HOSTNQN, 1, 128);
        assert!(completion.ok(), "round {round}: {completion:?}");
    }
    let data = pattern(65536, 1);
    assert!(io.write(1, 0, &data).ok());
    assert_eq!(io.read(1, 0, 65536).expect_ok(), data);
    drop((admin, io));
    rig.await_connections(0);
    rig.check_health();
}

#[test]
fn more_writes_with_their_data_than_the_queue_holds_all_land() {
    let rig = Rig::start();
    let (_admin, mut io) = rig.connect_as(HOSTNQN, 32);
    let mut bytes = Vec::new();
    for i in 0..512u16 {
        let sqe = Sqe::rw(1, 1, i.into(), 0).sgl(IN_CAPSULE, 4096).cid(i);
        bytes.extend(io.pdu(4, 0, &sqe.0, &pattern(4096, i as u8)));
    }
    io.send(&bytes);
    let seen: std::collections::BTreeSet<u16> = (0..512)
        .map(|_| io.complete(&[]))
        .map(|completion| if completion.ok() { completion.cid } else { panic!("{completion:?}") })
        .collect();
    assert_eq!(seen.len(), 512);
    for i in 0..512 {
        assert_eq!(io.read(1, i, 4096).expect_ok(), pattern(4096, i as u8), "block {i}");
    }
    rig.check_health();
}

#[test]
fn a_command_id_of_an_event_request_that_waits_is_taken() {
    let rig = Rig::start();
    let mut admin = rig.admin();
    admin.set_feature(0x0B, 0x100).expect_ok();
    let cid = admin.submit(Sqe::new(0x0C, 0), &[]);
    let keep_alive = admin.pdu(4, 0, &Sqe::new(0x18, 0).cid(cid).0, &[]);
    admin.send(&keep_alive);
    admin.complete(&[]).expect_refused(ID_CONFLICT);
    rig.ask(|target, _| async move { target.remove_namespace(SUBNQN, 1).await });
    let event = admin.complete(&[]);
    assert_eq!((event.cid, event.result), (cid, 0x0004_0002), "the request is still there");
    admin.send(&keep_alive);
    assert!(admin.complete(&[]).ok(), "and its identifier is free again");
}

// ---- keep alive ----------------------------------------------------------------------------------------------------

#[test]
fn discovery_lasts_as_long_as_it_is_kept_alive_and_no_longer() {
    let rig = Rig::start();
    let data = Wire::connect_data(0xFFFF, DISCOVERY.as_bytes(), HOSTNQN.as_bytes(), HOSTID);
    let mut wire = rig.wire();
    wire.command(Wire::connect_sqe(0, 32, 301), &data).expect_ok();
    wire.enable();
    assert_eq!(wire.get_feature(0x0F).result, 400, "rounded up");
    assert_eq!(rig.target.controllers(DISCOVERY).unwrap()[0].keep_alive_ms, 400);
    wire.set_feature(0x0B, 1 << 31).expect_ok();
    let event = wire.submit(Sqe::new(0x0C, 0), &[]);
    for _ in 0..15 {
        std::thread::sleep(Duration::from_millis(150));
        assert!(wire.command(Sqe::new(0x18, 0), &[]).ok());
    }
    add_subsystem(&rig, SubsystemSpec::new(OTHER_SUBSYSTEM));
    assert_eq!(wire.complete(&[]).cid, event);
    let start = Instant::now();
    assert!(wire.is_closed());
    let waited = start.elapsed();
    assert!((Duration::from_millis(350)..Duration::from_secs(3)).contains(&waited), "{waited:?}");
    rig.await_connections(0);
    rig.check_health();
}

#[test]
fn admin_commands_are_answered_although_all_memory_for_data_is_taken() {
    memory::configure(&ArenaConfig { budget: 48 << 20, threads: 3, ..ArenaConfig::default() });
    let rig = Rig::start();
    let mut admin = rig.admin();
    let mut queues: Vec<Wire> = (1..=8).map(|_| rig.wire()).collect();
    for (qid, io) in (1..).zip(&mut queues) {
        io.connect_io(&admin, HOSTNQN, qid, 128).expect_ok();
    }
    for io in &mut queues {
        for i in 0..128 {
            io.submit(Sqe::rw(1, 1, i * 64, 63).sgl(TRANSPORT, 256 << 10), &[]);
        }
    }
    let start = Instant::now();
    for _ in 0..200 {
        assert!(admin.command(Sqe::new(0x18, 0), &[]).ok());
        assert!(admin.identify(1, 0).ok());
    }
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    rig.check_health();
}

#[test]
fn keep_alive_is_answered_while_a_huge_volume_is_deleted() {
    let rig = Rig::start();
    let manager = PoolManager::new(rig.reactors(), 64 << 20);
    let device = Device::open("ram:512MiB", OpenOptions::default()).unwrap();
    let pool = block_on(async move {
        let pool = manager.create("pool", vec![device], PoolOptions::default()).await.unwrap();
        let spec =
            VolumeSpec { name: "v".into(), size: 1 << 40, block_size: 4096, write_cache: true, uuid: None };
        pool.volume_create(spec).await.unwrap();
        pool
    });
    let opened = pool.clone();
    let volume = block_on(async move { opened.open("v").await.unwrap() });
    let spec = NamespaceSpec::new(Backend::Volume(volume), "pool/v");
    assert_eq!(rig.target.add_namespace(SUBNQN, spec).unwrap(), 2);
    let (mut admin, mut io) = rig.connect();
    // All over the volume, so that its tree is as large as so few blocks can make it.
    for i in 0..4096u64 {
        let sqe = Sqe::rw(1, 2, i << 16, 0).sgl(IN_CAPSULE, 4096);
        io.command(sqe, &pattern(4096, i as u8)).expect_ok();
    }
    rig.ask(|target, _| async move { target.remove_namespace(SUBNQN, 2).await });
    let deleting = std::thread::spawn(move || block_on(async move { pool.delete("v").await }).is_ok());
    let mut slowest = Duration::ZERO;
    let until = Instant::now() + Duration::from_millis(300);
    while !deleting.is_finished() || Instant::now() < until {
        let start = Instant::now();
        assert!(admin.command(Sqe::new(0x18, 0), &[]).ok());
        slowest = slowest.max(start.elapsed());
    }
    assert!(deleting.join().unwrap());
    assert!(slowest < Duration::from_secs(1), "{slowest:?}");
    rig.check_health();
}

// ---- reset and shutdown --------------------------------------------------------------------------------------------

#[test]
fn no_write_lands_after_the_reset_that_ended_it() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = directory.path().join("disk.img");
    let rig = Rig::with_device(&format!("uring:{}?size=64MiB", file.display()));
    let (mut admin, mut io) = rig.connect();
    for round in 0..10u8 {
        let old = pattern(256 << 10, round);
        for i in 0..32 {
            io.submit(Sqe::rw(1, 1, i * 64, 63).sgl(TRANSPORT, 256 << 10), &[]);
        }
        for _ in 0..16 {
            let r2t = io.expect(9);
            io.send_host_data(r2t.u16(8), r2t.u16(10), 0, &old, 256 << 10);
        }
        admin.property_set(0x14, 0x0046_0000).expect_ok();
        await_status(&mut admin, |csts| csts & 1 == 0);
        admin.enable();
        io = rig.wire();
        io.connect_io(&admin, HOSTNQN, 1, 128).expect_ok();
        let new = vec![round ^ 0xFF; 256 << 10];
        for i in 0..32 {
            assert!(io.write(1, i * 64, &new).ok());
        }
        std::thread::sleep(Duration::from_millis(20));
        for i in 0..32 {
            assert_eq!(io.read(1, i * 64, 256 << 10).expect_ok(), new, "round {round}");
        }
    }
    rig.check_health();
}

#[test]
fn event_requests_survive_no_reset_and_are_counted_anew_after_each() {
    let rig = Rig::start();
    let mut admin = rig.admin();
    for _ in 0..20 {
        admin.set_feature(0x0B, 0x100).expect_ok();
        let mut waiting: Vec<u16> = (0..4).map(|_| admin.submit(Sqe::new(0x0C, 0), &[])).collect();
        let set = admin.submit(Sqe::fabrics(0).dword(11, 0x14).dword(12, 0x0046_0000), &[]);
        for _ in 0..4 {
            let ended = admin.complete(&[]);
            assert_eq!(ended.code(), ABORTED_SQ_DELETION);
            waiting.retain(|&cid| cid != ended.cid);
        }
        assert!(waiting.is_empty() && admin.complete(&[]).cid == set);
        // Disabled, it takes none, and nothing else of the kind.
        for sqe in [Sqe::new(0x0C, 0), Sqe::new(0x18, 0), Sqe::new(0x08, 0), Sqe::new(0x09, 0).dword(10, 7)] {
            assert_eq!(admin.command(sqe, &[]).code(), SEQUENCE);
        }
        assert_eq!(admin.identify(1, 0).code(), SEQUENCE);
        admin.enable();
    }
    admin.set_feature(0x0B, 0x100).expect_ok();
    let event = admin.submit(Sqe::new(0x0C, 0), &[]);
    let device = Device::open("ram:1MiB", OpenOptions::default()).unwrap();
    rig.target.add_namespace(SUBNQN, NamespaceSpec::new(Backend::Device(device), "late")).unwrap();
    assert_eq!(admin.complete(&[]).cid, event);
    rig.check_health();
}

#[test]
fn a_shutdown_under_mixed_load_ends_in_time_and_disturbs_nobody() {
    let rig = Rig::start();
    let (_other_admin, mut other) = rig.connect_as(OTHER_HOST, 32);
    // Normal and abrupt.
    for cc in [0x0046_4001, 0x0046_8001].into_iter().cycle().take(20) {
        let mut admin = rig.admin();
        let mut queues: Vec<Wire> = (1..=4).map(|_| rig.wire()).collect();
        for (qid, io) in (1..).zip(&mut queues) {
            io.connect_io(&admin, HOSTNQN, qid, 32).expect_ok();
            load(io, 8);
        }
        admin.property_set(0x14, cc).expect_ok();
        let seen = await_status(&mut admin, |csts| csts >> 2 & 3 == 2);
        let (last, before) = seen.split_last().unwrap();
        assert!(before.iter().all(|csts| csts >> 2 & 3 == 1) && last & 2 == 0, "{seen:x?}");
        for io in &mut queues {
            while io.receive().is_some() {}
        }
        assert_eq!(admin.identify(1, 0).code(), SEQUENCE);
        assert_eq!(rig.wire().connect_io(&admin, HOSTNQN, 1, 32).code(), SEQUENCE);
        // A reset begins anew.
        admin.property_set(0x14, 0).expect_ok();
        admin.enable();
        assert_eq!(admin.property_get(0x1C, false).result, 1);
        assert!(rig.wire().connect_io(&admin, HOSTNQN, 1, 32).ok());
        assert!(other.read(1, 0, 4096).ok());
    }
    rig.check_health();
}

// ---- what goes away ------------------------------------------------------------------------------------------------

#[test]
fn a_host_that_is_removed_in_the_middle_of_work_is_cut_and_does_not_come_back() {
    let rig = Rig::start();
    for host in [HOSTNQN, OTHER_HOST] {
        rig.target.add_host(SUBNQN, host).unwrap();
    }
    rig.ask(|target, _| async move { target.allow_any_host(SUBNQN, false).await });
    let (mut admin, mut io) = rig.connect();
    load(&mut io, 32);
    let cntlid = admin.cntlid;
    let start = Instant::now();
    rig.ask(|target, _| async move { target.remove_host(SUBNQN, HOSTNQN).await });
    assert!(start.elapsed() < Duration::from_secs(5));
    assert!(admin.is_closed());
    while io.receive().is_some() {}
    for qid in [0, 1] {
        let cntlid = if qid == 0 { 0xFFFF } else { cntlid };
        try_connect(&rig, qid, cntlid, SUBNQN, HOSTNQN).expect_refused(INVALID_HOST);
    }
    rig.check_health();
    // Allowed again, it is as welcome as before.
    rig.target.add_host(SUBNQN, HOSTNQN).unwrap();
    assert!(rig.connect().1.read(1, 0, 4096).ok());
}

#[test]
fn no_queue_of_a_deleted_subsystem_is_worth_a_retry() {
    let rig = Rig::start();
    add_subsystem(&rig, SubsystemSpec::new(OTHER_SUBSYSTEM));
    let (mut admin, mut io) = rig.connect();
    load(&mut io, 32);
    rig.ask(|target, _| async move { target.delete_subsystem(SUBNQN).await });
    assert!(admin.is_closed());
    while io.receive().is_some() {}
    for (qid, cntlid) in [(0, 0xFFFF), (1, admin.cntlid)] {
        let refused = try_connect(&rig, qid, cntlid, SUBNQN, HOSTNQN);
        assert_eq!(refused.result, SUBNQN_AT);
        refused.expect_refused(INVALID_PARAMETERS);
    }
    try_connect(&rig, 0, 0xFFFF, OTHER_SUBSYSTEM, OTHER_HOST).expect_ok();
    rig.await_connections(0);
}

#[test]
fn commands_on_a_device_that_has_vanished_end_and_its_namespace_can_be_replaced() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("disk.img");
    let rig = Rig::with_device(&format!("uring:{}?size=64MiB", path.display()));
    let (_admin, mut io) = rig.connect();
    for round in 0..10 {
        // Cut to nothing under the target.
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(0).unwrap();
        for i in 0..64 {
            io.submit(Sqe::rw(2, 1, i * 16, 15).sgl(TRANSPORT, 65536), &[]);
        }
        for _ in 0..64 {
            assert!(!io.complete(&[]).ok(), "round {round}: a read of nothing");
        }
        let start = Instant::now();
        rig.ask(|target, _| async move { target.remove_namespace(SUBNQN, 1).await });
        assert!(start.elapsed() < Duration::from_secs(2));
        io.get(Sqe::rw(2, 1, 0, 0), 4096).expect_refused(0x00B);
        let device = Device::open("ram:64MiB", OpenOptions::default()).unwrap();
        let spec = NamespaceSpec::new(Backend::Device(device), "spare");
        assert_eq!(rig.target.add_namespace(SUBNQN, spec).unwrap(), 1);
        rig.check_health();
        rig.ask(|target, _| async move { target.remove_namespace(SUBNQN, 1).await });
        let spec = NamespaceSpec::new(Backend::Device(rig.device.clone()), "gone");
        assert_eq!(rig.target.add_namespace(SUBNQN, spec).unwrap(), 1);
    }
}
