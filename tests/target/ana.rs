//! Asymmetric namespace access: two ways to one subsystem, and what hosts that came in by each of them are told and may do.

use std::net::SocketAddr;

use rimrock::device::{Device, OpenOptions};
use rimrock::reactor::block_on;
use rimrock::target::{AnaState, Backend, NamespaceSpec, SubsystemSpec, TargetError};

use crate::client::*;

const NQN: &str = "nqn.2024-01.io.rimrock:paths";
const ANA_LOG: u8 = 0x0C;
const INVALID_FIELD: u16 = 0x002;
const INVALID_NAMESPACE: u16 = 0x00B;
const PERSISTENT_LOSS: u16 = 0x301;
const INACCESSIBLE: u16 = 0x302;
const TRANSITION: u16 = 0x303;
const NAMESPACE_EVENT: u64 = 0x0004_0002;
const ANA_EVENT: u64 = 0x000C_0302;
/// Bits 8 and 11 of the event configuration: namespaces, and how they are reached.
const BOTH_EVENTS: u32 = 0x900;

/// A subsystem that reports access states, with a namespace of 64 MiB, on two addresses.
struct Paths {
    rig: Rig,
    a: SocketAddr,
    b: SocketAddr,
}

impl Paths {
    fn start() -> Paths {
        Paths::with(Rig::start(), 256)
    }

    fn with(rig: Rig, max_namespaces: u32) -> Paths {
        let spec = SubsystemSpec {
            allow_any_host: true,
            ana_reporting: true,
            max_namespaces,
            ..SubsystemSpec::new(NQN)
        };
        rig.target.create_subsystem(spec).unwrap();
        let paths = Paths { a: listen(&rig.target, NQN), b: listen(&rig.target, NQN), rig };
        assert_eq!(paths.add(1, None), 1);
        paths
    }

    /// The rig's device once more, as another namespace.
    fn add(&self, nsid: u32, group: Option<u32>) -> u32 {
        let mut spec = NamespaceSpec::new(Backend::Device(self.rig.device.clone()), "ram");
        spec.nsid = Some(nsid);
        spec.ana_group = group;
        spec.uuid = Some(uuid::Uuid::from_u128(0x1000 + u128::from(nsid)));
        self.rig.target.add_namespace(NQN, spec).unwrap()
    }

    fn set(&self, addr: SocketAddr, group: Option<u32>, state: AnaState) {
        self.try_set(addr, group, state).unwrap();
    }

    fn try_set(&self, addr: SocketAddr, group: Option<u32>, state: AnaState) -> Result<(), TargetError> {
        let target = self.rig.target.clone();
        block_on(async move { target.set_ana_state(NQN, addr, group, state).await })
    }

    fn admin(&self, addr: SocketAddr) -> Wire {
        let mut admin = Wire::open(addr);
        admin.handshake();
        admin.connect_admin(NQN, HOSTNQN).expect_ok();
        admin.enable();
        admin
    }

    fn io(&self, admin: &Wire, qid: u16) -> Wire {
        let mut io = Wire::open(admin.stream.peer_addr().unwrap());
        io.handshake();
        let data = Wire::connect_data(admin.cntlid, NQN.as_bytes(), HOSTNQN.as_bytes(), HOSTID);
        io.command(Wire::connect_sqe(qid, 128, 0), &data).expect_ok();
        io
    }

    fn connect(&self, addr: SocketAddr) -> (Wire, Wire) {
        let admin = self.admin(addr);
        let io = self.io(&admin, 1);
        (admin, io)
    }
}

fn le(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte))
}

/// CHGCNT and, of each group, (id, state, CHGCNT, NSIDs).
type Log = (u64, Vec<(u32, u8, u64, Vec<u32>)>);

fn parse(page: &[u8]) -> Log {
    let mut groups = Vec::new();
    let mut at = 16;
    for _ in 0..le(&page[8..10]) {
        let count = le(&page[at + 4..at + 8]) as usize;
        let nsids = page[at + 32..][..4 * count].chunks(4).map(|nsid| le(nsid) as u32).collect();
        groups.push((le(&page[at..at + 4]) as u32, page[at + 16], le(&page[at + 8..at + 16]), nsids));
        at += 32 + 4 * count;
    }
    (le(&page[..8]), groups)
}

fn log(admin: &mut Wire, rae: bool) -> Log {
    parse(&admin.log_page(ANA_LOG, 0, 16384, rae).expect_ok())
}

/// Fails with this status, and may be tried elsewhere.
#[track_caller]
fn expect_path_error(completion: Completion, code: u16) {
    assert_eq!((completion.code(), completion.dnr()), (code, false), "status {:03X}", completion.code());
}

#[test]
fn a_controller_says_that_ways_differ_only_where_they_do() {
    let paths = Paths::start();
    let mut admin = paths.admin(paths.a);
    let id = admin.identify(1, 0).expect_ok();
    assert_eq!(id[76], 0x0B, "CMIC: several ports, several controllers, ANA");
    assert_eq!(le(&id[92..96]), 0x900, "OAES");
    assert_eq!((id[342], id[343]), (10, 0x5F), "ANATT; ANACAP: every state, groups that stay");
    assert_eq!((le(&id[344..348]), le(&id[348..352])), (256, 256), "ANAGRPMAX, NANAGRPID");
    let namespace = admin.identify(0, 1).expect_ok();
    assert_eq!((le(&namespace[92..96]), namespace[30]), (1, 1), "ANAGRPID, NMIC");
    assert_eq!(le(&admin.identify(8, 1).expect_ok()[4..8]), 1, "ANAGRPID, independent of the command set");
    let supported = admin.log_page(0, 0, 1024, true).expect_ok();
    assert_eq!(supported[4 * usize::from(ANA_LOG)], 1);
    assert_eq!(log(&mut admin, true), (1, vec![(1, 1, 1, vec![1])]));

    let mut plain = paths.rig.admin();
    let id = plain.identify(1, 0).expect_ok();
    assert_eq!((id[76] & 8, le(&id[92..96]) & 0x800), (0, 0));
    assert!(id[342..352].iter().all(|&byte| byte == 0));
    assert_eq!(le(&plain.identify(0, 1).expect_ok()[92..96]), 0);
    plain.log_page(ANA_LOG, 0, 16, true).expect_refused(0x109);
    assert_eq!(plain.log_page(0, 0, 1024, true).expect_ok()[4 * usize::from(ANA_LOG)], 0);
    paths.rig.check_health();
}

#[test]
fn commands_are_answered_as_the_state_of_their_way_says_and_the_other_way_works() {
    let paths = Paths::start();
    paths.add(2, None);
    let (mut admin, mut io) = paths.connect(paths.a);
    let (_other_admin, mut other) = paths.connect(paths.b);
    let old = pattern(8192, 1);
    assert!(io.write(1, 0, &old).ok());
    for (state, code, byte) in [
        (AnaState::NonOptimized, 0, 2),
        (AnaState::Inaccessible, INACCESSIBLE, 3),
        (AnaState::PersistentLoss, PERSISTENT_LOSS, 4),
        (AnaState::Change, TRANSITION, 0x0F),
        (AnaState::Optimized, 0, 1),
    ] {
        paths.set(paths.a, Some(1), state);
        assert_eq!(log(&mut admin, true).1[0].1, byte);
        let new = pattern(8192, byte);
        let mut range = [0; 16];
        range[4] = 1;
        // In a capsule, by request, and without data.
        let big = pattern(16384, byte);
        for completion in [
            io.write(1, 0, &new),
            io.write(1, 100, &big),
            io.read(1, 0, 8192),
            io.command(Sqe::rw(8, 1, 50, 0), &[]),
            io.command(Sqe::new(0, 1), &[]),
            io.command(Sqe::new(0, 0xFFFF_FFFF), &[]),
            io.command(Sqe::new(9, 1).dword(11, 4).sgl(IN_CAPSULE, 16), &range),
            // What is wrong besides is not looked at on a way that is closed.
        ] {
            expect_path_error(completion, code);
        }
        if code != 0 {
            expect_path_error(io.read(1, 1 << 40, 4096), code);
            assert!(other.write(1, 0, &old).ok() && other.read(1, 0, 8192).expect_ok() == old);
        }
        // Another group, and a namespace that is not there.
        assert!(io.read(2, 0, 4096).ok());
        assert_eq!(io.read(3, 0, 4096).code(), INVALID_NAMESPACE);
        let namespace = admin.identify(0, 1).expect_ok();
        assert_eq!(le(&namespace[..8]), 16384, "NSZE stays");
        assert_eq!(le(&namespace[16..24]) == 0, matches!(byte, 3 | 4), "NUSE in state {byte}");
    }
    paths.rig.check_health();
}

#[test]
fn features_that_lie_with_a_namespace_are_not_reached_by_a_closed_way() {
    let paths = Paths::start();
    let mut admin = paths.admin(paths.a);
    let get = |admin: &mut Wire, fid: u32, nsid: u32| admin.command(Sqe::new(0x0A, nsid).dword(10, fid), &[]);
    let set = |admin: &mut Wire, fid: u32, nsid: u32| admin.command(Sqe::new(0x09, nsid).dword(10, fid), &[]);
    assert!(get(&mut admin, 5, 1).ok() && set(&mut admin, 5, 1).ok());
    paths.set(paths.a, Some(1), AnaState::Inaccessible);
    expect_path_error(get(&mut admin, 5, 1), INACCESSIBLE);
    expect_path_error(set(&mut admin, 5, 1), INACCESSIBLE);
    assert!(get(&mut admin, 7, 0).ok() && get(&mut admin, 11, 0).ok(), "the controller's own");
    paths.set(paths.a, Some(1), AnaState::PersistentLoss);
    expect_path_error(set(&mut admin, 5, 1), PERSISTENT_LOSS);
    expect_path_error(set(&mut admin, 1, 1), PERSISTENT_LOSS);
    assert!(admin.command(Sqe::new(0x18, 0), &[]).ok() && admin.identify(2, 0).ok());
}

#[test]
fn hosts_hear_of_their_own_way_once_until_they_have_read_it_and_only_if_they_asked() {
    let paths = Paths::start();
    let (mut a, mut b, mut deaf) = (paths.admin(paths.a), paths.admin(paths.b), paths.admin(paths.a));
    let mut waiting = Vec::new();
    for (admin, wanted) in [(&mut a, 0x800), (&mut b, 0x800), (&mut deaf, 0x100)] {
        admin.set_feature(0x0B, wanted).expect_ok();
        waiting.push(admin.submit(Sqe::new(0x0C, 0), &[]));
    }
    paths.set(paths.a, None, AnaState::Inaccessible);
    let event = a.complete(&[]);
    assert_eq!((event.cid, event.result), (waiting[0], ANA_EVENT));
    // Held back until the log was read, and not lost.
    let again = a.submit(Sqe::new(0x0C, 0), &[]);
    paths.set(paths.a, None, AnaState::Optimized);
    paths.set(paths.a, None, AnaState::Optimized);
    assert_eq!(log(&mut a, true).1[0].1, 1);
    assert!(a.command(Sqe::new(0x18, 0), &[]).ok(), "retained: no event yet");
    paths.set(paths.a, None, AnaState::NonOptimized);
    let seen = log(&mut a, false);
    assert_eq!((seen.1[0].1, seen.0, seen.1[0].2), (2, 4, 4));
    let event = a.complete(&[]);
    assert_eq!((event.cid, event.result), (again, ANA_EVENT));
    log(&mut a, false);
    a.submit(Sqe::new(0x0C, 0), &[]);
    // Nobody else has heard a thing: what comes next is the answer to the next command.
    for admin in [&mut a, &mut b, &mut deaf] {
        assert!(admin.command(Sqe::new(0x18, 0), &[]).ok());
    }
    // It is told as soon as it asks.
    deaf.set_feature(0x0B, 0x800).expect_ok();
    assert_eq!(deaf.complete(&[]).result, ANA_EVENT);
}

#[test]
fn a_namespace_that_comes_is_told_of_in_both_lists() {
    let paths = Paths::start();
    let mut admin = paths.admin(paths.a);
    admin.set_feature(0x0B, BOTH_EVENTS).expect_ok();
    admin.submit(Sqe::new(0x0C, 0), &[]);
    paths.add(7, Some(3));
    assert_eq!(admin.complete(&[]).result, NAMESPACE_EVENT);
    // There was one request only; the other event waits for the next.
    admin.submit(Sqe::new(0x0C, 0), &[]);
    assert_eq!(admin.complete(&[]).result, ANA_EVENT);
    assert_eq!(le(&admin.log_page(4, 0, 4096, false).expect_ok()[..4]), 7);
    assert_eq!(log(&mut admin, false).1, [(1, 1, 1, vec![1]), (3, 1, 2, vec![7])]);
    admin.submit(Sqe::new(0x0C, 0), &[]);
    admin.submit(Sqe::new(0x0C, 0), &[]);
    paths.rig.ask(|target, _| async move { target.remove_namespace(NQN, 7).await });
    assert_eq!([admin.complete(&[]).result, admin.complete(&[]).result], [NAMESPACE_EVENT, ANA_EVENT]);
    assert_eq!(log(&mut admin, false).1, [(1, 1, 1, vec![1])]);
}

#[test]
fn nothing_that_was_under_way_lands_once_the_way_is_closed() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = directory.path().join("disk.img");
    let paths = Paths::with(Rig::with_device(&format!("uring:{}?size=64MiB", file.display())), 256);
    let (_admin, mut io) = paths.connect(paths.a);
    let (_other_admin, mut other) = paths.connect(paths.b);
    for round in 0..10u8 {
        let old = pattern(256 << 10, round);
        let mut waiting = Vec::new();
        for i in 0..32 {
            waiting.push(io.submit(Sqe::rw(1, 1, i * 64, 63).sgl(TRANSPORT, 256 << 10), &[]));
        }
        // Half of them have their data, half wait for it when the way closes.
        let mut late = Vec::new();
        for i in 0..32 {
            let r2t = io.expect(9);
            if i < 16 {
                io.send_host_data(r2t.u16(8), r2t.u16(10), 0, &old, 256 << 10);
            } else {
                late.push((r2t.u16(8), r2t.u16(10)));
            }
        }
        paths.set(paths.a, None, AnaState::Inaccessible);
        let new = vec![round ^ 0xFF; 256 << 10];
        for i in 0..32 {
            assert!(other.write(1, i * 64, &new).ok());
        }
        // Data that comes late is taken, and goes nowhere.
        for (cid, ttag) in late {
            io.send_host_data(cid, ttag, 0, &old, 256 << 10);
        }
        for _ in 0..32 {
            let ended = io.complete(&[]);
            assert!(matches!(ended.code(), 0 | INACCESSIBLE) && !ended.dnr(), "{:03X}", ended.code());
            waiting.retain(|&cid| cid != ended.cid);
        }
        assert!(waiting.is_empty(), "each command is answered once");
        expect_path_error(io.read(1, 0, 4096), INACCESSIBLE);
        for i in 0..32 {
            assert_eq!(other.read(1, i * 64, 256 << 10).expect_ok(), new, "round {round}");
        }
        paths.set(paths.a, None, AnaState::Optimized);
        assert_eq!(io.read(1, 0, 4096).expect_ok(), new[..4096]);
    }
    paths.rig.check_health();
}

#[test]
fn states_flip_under_load_and_no_command_is_lost_or_lands_late() {
    let paths = Paths::start();
    let stop = std::sync::atomic::AtomicBool::new(false);
    let old = vec![0; 8192];
    let (_admin, mut io) = paths.connect(paths.a);
    assert!(io.write(1, 0, &old).ok() && io.write(1, 1024, &old).ok());
    std::thread::scope(|scope| {
        for (addr, first) in [(paths.a, 0), (paths.b, 1024)] {
            let (paths, stop) = (&paths, &stop);
            scope.spawn(move || {
                let (_admin, mut io) = paths.connect(addr);
                let mut stands = vec![0; 8192];
                let (mut seed, mut done, mut refused) = (0u8, 0, 0);
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    seed = seed.wrapping_add(1);
                    let data = pattern(8192, seed);
                    match io.write(1, first, &data).code() {
                        0 => {
                            stands = data;
                            done += 1;
                        }
                        code => {
                            assert!(matches!(code, INACCESSIBLE | TRANSITION), "{code:03X}");
                            refused += 1;
                        }
                    }
                    match io.read(1, first, 8192) {
                        read if read.ok() => assert_eq!(read.data, stands),
                        read => {
                            assert!(matches!(read.code(), INACCESSIBLE | TRANSITION), "{:03X}", read.code())
                        }
                    }
                }
                assert!(done > 20 && refused > 20, "{done} done, {refused} refused");
            });
        }
        for round in 0..200 {
            let (closed, open) = if round % 2 == 0 { (paths.a, paths.b) } else { (paths.b, paths.a) };
            paths.set(closed, None, [AnaState::Inaccessible, AnaState::Change][round / 2 % 2]);
            paths.set(open, None, AnaState::Optimized);
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    paths.rig.check_health();
}

#[test]
fn a_log_of_any_length_is_read_in_pieces_without_a_tear() {
    for count in [1, 228, 229, 1100] {
        let paths = Paths::with(Rig::start(), 4096);
        for nsid in 2..=count {
            paths.add(nsid, (nsid % 5 == 0).then_some(4096));
        }
        let mut admin = paths.admin(paths.a);
        let whole = admin.log_page(ANA_LOG, 0, 128 << 10, true).expect_ok();
        let log = parse(&whole);
        let mut nsids: Vec<u32> = log.1.iter().flat_map(|group| group.3.clone()).collect();
        nsids.sort_unstable();
        assert_eq!(nsids, (1..=count).collect::<Vec<u32>>(), "each exactly once");
        let len = 16 + 32 * log.1.len() + 4 * count as usize;
        assert!(whole[len..].iter().all(|&byte| byte == 0));
        let mut pieces = Vec::new();
        while pieces.len() < len {
            pieces.extend(admin.log_page(ANA_LOG, pieces.len() as u64, 4096, true).expect_ok());
            // It changes between two pieces: the host has the log as it was, and sees by the next header that it is old.
            paths.set(paths.a, Some(1 + pieces.len() as u32 % 3), AnaState::NonOptimized);
            paths.set(paths.a, Some(1 + pieces.len() as u32 % 3), AnaState::Optimized);
        }
        assert_eq!(pieces[..len], whole[..len]);
        let now = parse(&admin.log_page(ANA_LOG, 0, 128 << 10, true).expect_ok());
        assert!(now.0 > log.0, "CHGCNT");
        // Up to the length that Identify speaks of there are zeros, and beyond it nothing.
        let end = 16 + 4096 * (32 + 4);
        assert_eq!(admin.log_page(ANA_LOG, end - 4, 4, true).expect_ok(), [0; 4]);
        for beyond in [end, end + 4, u64::MAX - 3] {
            admin.log_page(ANA_LOG, beyond, 4, true).expect_refused(INVALID_FIELD);
        }
        // Groups alone.
        let sqe = Sqe::new(0x02, 0xFFFF_FFFF).dword(10, u32::from(ANA_LOG) | 1 << 8 | 0x3FFF << 16);
        let groups = parse(&admin.get(sqe, 64 << 10).expect_ok());
        assert!(groups.1.iter().all(|group| group.3.is_empty()));
        let ids = |log: &Log| log.1.iter().map(|group| group.0).collect::<Vec<u32>>();
        assert_eq!(ids(&groups), ids(&log));
        // The lists of namespaces, in pages of 1024.
        for cns in [0x02, 0x10] {
            let mut found = Vec::new();
            loop {
                let page = admin.identify(cns, found.last().copied().unwrap_or(0)).expect_ok();
                let list: Vec<u32> =
                    page.chunks(4).map(|nsid| le(nsid) as u32).take_while(|&nsid| nsid != 0).collect();
                found.extend(&list);
                if list.len() < 1024 {
                    break;
                }
            }
            assert_eq!(found, nsids, "CNS {cns:#x}");
        }
    }
}

#[test]
fn groups_and_listeners_that_are_not_there_are_named() {
    let paths = Paths::start();
    for group in [257, u32::MAX] {
        let error = paths.try_set(paths.a, Some(group), AnaState::Optimized).unwrap_err();
        assert_eq!(error.field(), Some("anagrpid"), "{error}");
    }
    let nowhere = SocketAddr::from(([127, 0, 0, 9], 9));
    assert!(paths.try_set(nowhere, None, AnaState::Optimized).unwrap_err().is_not_found());
    let target = paths.rig.target.clone();
    let addr = paths.rig.addr;
    let error = block_on(async move { target.set_ana_state(SUBNQN, addr, None, AnaState::Change).await });
    assert!(matches!(error, Err(TargetError::AnaNotReported { .. })));
    let device = Device::open("ram:1MiB", OpenOptions::default()).unwrap();
    let spec = NamespaceSpec { ana_group: Some(257), ..NamespaceSpec::new(Backend::Device(device), "d") };
    assert_eq!(paths.rig.target.add_namespace(NQN, spec).unwrap_err().field(), Some("anagrpid"));
    // A listener that goes and comes back begins anew.
    paths.set(paths.a, Some(1), AnaState::Inaccessible);
    let views = paths.rig.target.listeners(NQN).unwrap();
    assert_eq!(
        (views[0].ana_states[0], views[0].ana_states[1]),
        (AnaState::Inaccessible, AnaState::Optimized)
    );
    assert_eq!(views[1].ana_states[0], AnaState::Optimized);
    let a = paths.a;
    paths.rig.ask(move |target, _| async move { target.remove_listener(NQN, a).await });
    paths.rig.ask(move |target, _| async move { target.add_listener(NQN, a).await });
    let (_admin, mut io) = paths.connect(paths.a);
    assert!(io.read(1, 0, 4096).ok());
}
