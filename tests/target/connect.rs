//! Connect, properties, keep alive, and the ways in which an association ends.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rimrock::target::{SubsystemSpec, Target, TransportOptions};

use crate::client::*;

const INVALID_PARAMETERS: u16 = 0x182;
const INVALID_HOST: u16 = 0x184;
const SEQUENCE: u16 = 0x00C;
/// Dword 0 of a refusal: the parameter is in the data, at this offset.
const SUBNQN_AT: u64 = 1 << 16 | 256;
const HOSTNQN_AT: u64 = 1 << 16 | 512;
const CNTLID_AT: u64 = 1 << 16 | 16;
const HOSTID_AT: u64 = 1 << 16;

fn try_admin(rig: &Rig, cntlid: u16, subnqn: &[u8], hostnqn: &[u8]) -> Completion {
    let data = Wire::connect_data(cntlid, subnqn, hostnqn, HOSTID);
    rig.wire().command(Wire::connect_sqe(0, 32, 0), &data)
}

#[track_caller]
fn expect_parameter(completion: Completion, at: u64) {
    assert_eq!(completion.result, at, "IATTR and IPO");
    completion.expect_refused(INVALID_PARAMETERS);
}

#[test]
fn names_that_are_not_nqns_are_refused_and_named() {
    let rig = Rig::start();
    let of_len = |len: usize| {
        let mut name = b"nqn.2014-08.com.example:".to_vec();
        name.resize(len, b'x');
        name
    };
    let wrong: [Vec<u8>; 8] = [
        vec![0; 256],
        b"not-an-nqn".to_vec(),
        of_len(224),
        of_len(256),
        b"nqn.2014-00.com.example:x".to_vec(),
        b"nqn.2014-13.com.example:x".to_vec(),
        b"nqn.2014-08.org.nvmexpress:uuid:1234".to_vec(),
        b"nqn.2014-08.com.example:\xFF\xFE".to_vec(),
    ];
    for name in &wrong {
        let text = String::from_utf8_lossy(name).into_owned();
        let completion = try_admin(&rig, 0xFFFF, SUBNQN.as_bytes(), name);
        assert_eq!((completion.code(), completion.result), (INVALID_PARAMETERS, HOSTNQN_AT), "host {text:?}");
        let completion = try_admin(&rig, 0xFFFF, name, HOSTNQN.as_bytes());
        assert_eq!(
            (completion.code(), completion.result),
            (INVALID_PARAMETERS, SUBNQN_AT),
            "subsystem {text:?}"
        );
    }
    for name in [
        of_len(223),
        b"nqn.2008-04.org.example.lan.host1".to_vec(),
        b"nqn.2014-08.org.nvmexpress:uuid:11111111222233334444555555555555".to_vec(),
    ] {
        assert!(try_admin(&rig, 0xFFFF, SUBNQN.as_bytes(), &name).ok());
    }
    // A host without a name is known by a random UUID, if that is its identifier.
    let random = [1, 2, 3, 4, 5, 6, 0x47, 8, 0x89, 10, 11, 12, 13, 14, 15, 16];
    let data = Wire::connect_data(0xFFFF, SUBNQN.as_bytes(), b"", random);
    let mut wire = rig.wire();
    assert!(wire.command(Wire::connect_sqe(0, 32, 0), &data).ok());
    let controllers = rig.target.controllers(SUBNQN).unwrap();
    let name = "nqn.2014-08.org.nvmexpress:uuid:01020304-0506-4708-890a-0b0c0d0e0f10";
    assert!(controllers.iter().any(|c| c.hostnqn == name));
    rig.check_health();
}

#[test]
fn an_unknown_subsystem_and_a_host_that_is_not_allowed_are_told_apart() {
    let rig = Rig::start();
    rig.target.create_subsystem(SubsystemSpec::new("nqn.2024-01.io.rimrock:closed")).unwrap();
    let closed = b"nqn.2024-01.io.rimrock:closed";
    // It does not listen where the host comes in: not yet, perhaps, so the host may try again.
    let elsewhere = try_admin(&rig, 0xFFFF, closed, HOSTNQN.as_bytes());
    assert_eq!((elsewhere.code(), elsewhere.dnr()), (INVALID_PARAMETERS, false));
    assert_eq!(elsewhere.result, SUBNQN_AT);
    rig.ask(|target, addr| async move { target.add_listener("nqn.2024-01.io.rimrock:closed", addr).await });
    try_admin(&rig, 0xFFFF, closed, HOSTNQN.as_bytes()).expect_refused(INVALID_HOST);
    rig.target.add_host("nqn.2024-01.io.rimrock:closed", HOSTNQN).unwrap();
    assert!(try_admin(&rig, 0xFFFF, closed, HOSTNQN.as_bytes()).ok());
    expect_parameter(try_admin(&rig, 0xFFFF, b"nqn.2024-01.io.rimrock:none", HOSTNQN.as_bytes()), SUBNQN_AT);
}

#[test]
fn controllers_are_the_targets_to_choose() {
    let rig = Rig::start();
    for cntlid in [0xFFFE, 1, 0, 0xFFEF] {
        expect_parameter(try_admin(&rig, cntlid, SUBNQN.as_bytes(), HOSTNQN.as_bytes()), CNTLID_AT);
    }
    let mut first = rig.admin();
    let second = rig.admin_as(OTHER_HOST);
    assert_ne!(first.cntlid, second.cntlid);
    assert!((1..=0xFFEF).contains(&first.cntlid));
    let id = first.identify(1, 0).expect_ok();
    assert_eq!(u16::from_le_bytes(id[78..80].try_into().unwrap()), first.cntlid);
}

#[test]
fn an_io_queue_belongs_to_the_host_that_holds_the_controller() {
    let rig = Rig::start();
    let connect = |cntlid: u16, subnqn: &str, host: &str, hostid: [u8; 16], qid: u16| {
        let data = Wire::connect_data(cntlid, subnqn.as_bytes(), host.as_bytes(), hostid);
        rig.wire().command(Wire::connect_sqe(qid, 32, 0), &data)
    };
    let none = connect(1, SUBNQN, HOSTNQN, HOSTID, 1);
    assert_eq!((none.code(), none.result), (INVALID_PARAMETERS, CNTLID_AT), "no admin queue yet");
    let mut early = rig.wire();
    early.connect_admin(SUBNQN, HOSTNQN).expect_ok();
    assert_eq!(connect(early.cntlid, SUBNQN, HOSTNQN, HOSTID, 1).code(), SEQUENCE, "not enabled");
    early.enable();
    let cntlid = early.cntlid;
    assert_eq!(connect(cntlid + 1, SUBNQN, HOSTNQN, HOSTID, 1).result, CNTLID_AT, "a foreign id");
    expect_parameter(connect(cntlid, SUBNQN, OTHER_HOST, HOSTID, 1), HOSTNQN_AT);
    expect_parameter(connect(cntlid, SUBNQN, HOSTNQN, [1; 16], 1), HOSTID_AT);
    expect_parameter(connect(cntlid, "nqn.2024-01.io.rimrock:none", HOSTNQN, HOSTID, 1), SUBNQN_AT);
    // QID is at byte 42 of the command.
    expect_parameter(connect(cntlid, SUBNQN, HOSTNQN, HOSTID, 65535), 42);
    expect_parameter(connect(cntlid, SUBNQN, HOSTNQN, HOSTID, 129), 42);
    assert!(connect(cntlid, SUBNQN, HOSTNQN, HOSTID, 128).ok());
    rig.check_health();
}

#[test]
fn the_form_of_connect_is_checked() {
    let rig = Rig::start();
    let data = Wire::connect_data(0xFFFF, SUBNQN.as_bytes(), HOSTNQN.as_bytes(), HOSTID);
    let connect = |sqe: Sqe, data: &[u8]| rig.wire().command(sqe, data);
    // RECFMT is the low half of dword 10, SQSIZE of dword 11.
    connect(Wire::connect_sqe(0, 32, 0).dword(10, 1), &data).expect_refused(0x180);
    expect_parameter(connect(Wire::connect_sqe(0, 1, 0), &data), 44);
    expect_parameter(connect(Wire::connect_sqe(0, 1025, 0), &data), 44);
    assert!(connect(Wire::connect_sqe(0, 1024, 0), &data).ok());
    connect(Wire::connect_sqe(0, 32, 0).sgl(IN_CAPSULE, 512), &data[..512]).expect_refused(0x00F);
    connect(Wire::connect_sqe(0, 32, 0), &data[..512]).expect_refused(0x00F);
    connect(Wire::connect_sqe(0, 32, 0).sgl(0x40, 1024), &data).expect_refused(0x011);
    // Nothing else may come first.
    let mut wire = rig.wire();
    wire.command(Sqe::new(IDENTIFY, 0).sgl(TRANSPORT, 4096), &[]).expect_refused(SEQUENCE);
    wire.property_get(0, true).expect_refused(SEQUENCE);
    assert!(wire.connect_admin(SUBNQN, HOSTNQN).ok(), "the connection is still good");
    wire.connect_admin(SUBNQN, HOSTNQN).expect_refused(SEQUENCE);
    rig.check_health();
}

#[test]
fn commands_beyond_the_queue_wait_and_none_is_lost() {
    let rig = Rig::start();
    let (_admin, mut io) = rig.connect_as(HOSTNQN, 32);
    let mut bytes = Vec::new();
    for _ in 0..512 {
        let cid = io.next_cid();
        bytes.extend(io.pdu(4, 0, &Sqe::rw(2, 1, 0, 0).sgl(TRANSPORT, 4096).cid(cid).0, &[]));
    }
    io.send(&bytes);
    let mut seen: Vec<u16> = (0..512).map(|_| io.complete(&[])).map(|c| c.cid).collect();
    seen.sort_unstable();
    assert_eq!(seen, (seen[0]..seen[0] + 512).collect::<Vec<_>>());
    rig.check_health();
}

#[test]
fn more_writes_than_the_queue_holds_that_all_wait_for_data_end_the_connection() {
    let rig = Rig::start();
    let (_admin, mut io) = rig.connect_as(HOSTNQN, 16);
    for _ in 0..40 {
        io.submit(Sqe::rw(1, 1, 0, 7).sgl(TRANSPORT, 32768), &[]);
    }
    assert_eq!(io.expect_terminated().0, 5, "limit exceeded");
    rig.check_health();
}

#[test]
fn a_command_id_that_is_outstanding_is_a_conflict() {
    let rig = Rig::start();
    let (_admin, mut io) = rig.connect();
    let sqe = Sqe::rw(1, 1, 0, 7).sgl(TRANSPORT, 32768).cid(9);
    let pdu = io.pdu(4, 0, &sqe.0, &[]);
    io.send(&pdu);
    let r2t = io.expect(9);
    io.send(&pdu);
    io.complete(&[]).expect_refused(0x003);
    io.send_host_data(9, r2t.u16(10), 0, &pattern(32768, 1), 32768);
    assert!(io.complete(&[]).ok(), "the first one goes on");
    rig.check_health();
}

#[test]
fn a_queue_that_comes_back_at_once_is_let_in() {
    let rig = Rig::start();
    let (admin, mut io) = rig.connect();
    for round in 0..100 {
        io.reset();
        io = rig.wire();
        let completion = io.connect_io(&admin, HOSTNQN, 1, 128);
        assert!(completion.ok(), "round {round}: {completion:?}");
    }
    assert!(io.read(1, 0, 4096).ok());
    // A true duplicate is refused, but may be tried again.
    let duplicate = rig.wire().connect_io(&admin, HOSTNQN, 1, 128);
    assert_eq!((duplicate.code(), duplicate.dnr()), (SEQUENCE, false));
    assert!(io.read(1, 0, 4096).ok(), "the first is not disturbed");
    rig.check_health();
}

#[test]
fn many_rounds_of_connect_and_disconnect_leave_nothing() {
    let rig = Rig::start();
    for round in 0..100 {
        let (admin, mut io) = rig.connect();
        if round % 2 == 0 {
            // Disconnect ends one I/O queue.
            assert!(io.command(Sqe::fabrics(8), &[]).ok());
            assert!(io.is_closed());
        }
        drop(admin);
    }
    rig.await_connections(0);
    assert!(rig.target.controllers(SUBNQN).unwrap().is_empty());
}

#[test]
fn removing_a_host_cuts_it_and_only_it() {
    let rig = Rig::start();
    rig.target.add_host(SUBNQN, HOSTNQN).unwrap();
    rig.target.add_host(SUBNQN, OTHER_HOST).unwrap();
    let (mut admin, mut io) = rig.connect();
    let (_other_admin, mut other) = rig.connect_as(OTHER_HOST, 32);
    // Switching allow-any off does not touch hosts that are in the list.
    rig.ask(|target, _| async move { target.allow_any_host(SUBNQN, false).await });
    assert!(io.read(1, 0, 4096).ok());
    rig.ask(|target, _| async move { target.remove_host(SUBNQN, HOSTNQN).await });
    assert!(admin.is_closed() && io.is_closed());
    try_admin(&rig, 0xFFFF, SUBNQN.as_bytes(), HOSTNQN.as_bytes()).expect_refused(INVALID_HOST);
    assert!(other.read(1, 0, 4096).ok());
    assert_eq!(rig.target.controllers(SUBNQN).unwrap().len(), 1);
    // Nor does an unlisted host keep what it had when allow-any is switched off.
    rig.ask(|target, _| async move { target.allow_any_host(SUBNQN, true).await });
    let (mut admin, mut io) = rig.connect();
    rig.ask(|target, _| async move { target.allow_any_host(SUBNQN, false).await });
    assert!(admin.is_closed() && io.is_closed());
    assert!(other.read(1, 0, 4096).ok());
}

#[test]
fn a_deleted_subsystem_sends_its_hosts_away_for_good() {
    let rig = Rig::start();
    let (mut admin, mut io) = rig.connect();
    for i in 0..32 {
        io.submit(Sqe::rw(2, 1, i * 256, 255).sgl(TRANSPORT, 1 << 20), &[]);
    }
    let start = Instant::now();
    // Another subsystem keeps the listener open.
    rig.target.create_subsystem(SubsystemSpec::new("nqn.2024-01.io.rimrock:stays")).unwrap();
    rig.ask(|target, addr| async move { target.add_listener("nqn.2024-01.io.rimrock:stays", addr).await });
    rig.ask(|target, _| async move { target.delete_subsystem(SUBNQN).await });
    assert!(start.elapsed() < Duration::from_secs(5));
    assert!(admin.is_closed());
    while let Some(pdu) = io.receive() {
        assert!(matches!(pdu.kind(), 5 | 7));
    }
    let again = try_admin(&rig, 0xFFFF, SUBNQN.as_bytes(), HOSTNQN.as_bytes());
    expect_parameter(again, SUBNQN_AT);
    rig.await_connections(0);
}

#[test]
fn the_address_of_the_last_subsystem_says_farewell_and_closes() {
    const STAYS: &str = "nqn.2024-01.io.rimrock:stays";
    let rig = Rig::start();
    let farewell = |target: &Target, farewell| {
        target.set_transport(TransportOptions { farewell, ..target.transport() }).unwrap();
    };
    let refused = |addr, nqn: &str, dnr: bool| {
        let mut wire = Wire::open(addr);
        wire.handshake();
        let refused = wire.connect_admin(nqn, HOSTNQN);
        assert_eq!(
            (refused.code(), refused.result, refused.dnr()),
            (INVALID_PARAMETERS, SUBNQN_AT, dnr),
            "{nqn}"
        );
    };
    farewell(&rig.target, Duration::from_secs(60));
    let (mut admin, mut io) = rig.connect();
    rig.ask(|target, _| async move { target.delete_subsystem(SUBNQN).await });
    assert!(admin.is_closed() && io.is_closed());
    refused(rig.addr, SUBNQN, true);
    // Discovery answers meanwhile, and names nothing.
    let mut discovery = rig.wire();
    discovery.connect_admin(DISCOVERY, HOSTNQN).expect_ok();

    // The same address is used again, and then its time is up.
    rig.target.create_subsystem(SubsystemSpec::new(STAYS)).unwrap();
    rig.ask(|target, addr| async move { target.add_listener(STAYS, addr).await });
    rig.ask(|target, _| async move { target.allow_any_host(STAYS, true).await });
    let mut host = rig.wire();
    host.connect_admin(STAYS, HOSTNQN).expect_ok();
    refused(rig.addr, SUBNQN, true);
    farewell(&rig.target, Duration::from_millis(300));
    rig.ask(|target, _| async move { target.delete_subsystem(STAYS).await });
    assert!(host.is_closed());
    refused(rig.addr, STAYS, true);
    let start = Instant::now();
    while std::net::TcpStream::connect(rig.addr).is_ok() {
        assert!(start.elapsed() < Duration::from_secs(10), "the address is not given up");
        std::thread::sleep(Duration::from_millis(20));
    }

    // One that is away and will be back: its hosts may retry, and where nothing else is the address closes at once.
    let rig = Rig::start();
    let second = listen(&rig.target, SUBNQN);
    rig.target.create_subsystem(SubsystemSpec::new(STAYS)).unwrap();
    rig.ask(|target, addr| async move { target.add_listener(STAYS, addr).await });
    rig.ask(|target, _| async move { target.withdraw_subsystem(SUBNQN).await });
    refused(rig.addr, SUBNQN, false);
    assert!(std::net::TcpStream::connect(second).is_err());
    rig.target.create_subsystem(SubsystemSpec::new(SUBNQN)).unwrap();
    rig.ask(|target, _| async move { target.delete_subsystem(SUBNQN).await });
    refused(rig.addr, SUBNQN, true);
}

#[test]
fn a_listener_goes_with_all_queues_that_came_by_it_and_no_others() {
    let rig = Rig::start();
    let second = listen(&rig.target, SUBNQN);
    // Two hosts, each by a listener of its own, with two I/O queues.
    let associate = |addr: SocketAddr, host: &str| {
        let open = || {
            let mut wire = Wire::open(addr);
            wire.handshake();
            wire
        };
        let mut admin = open();
        admin.cntlid = admin.connect_admin(SUBNQN, host).result as u16;
        admin.enable();
        let mut queues = [open(), open()];
        for (queue, qid) in queues.iter_mut().zip(1..) {
            queue.connect_io(&admin, host, qid, 32).expect_ok();
        }
        (admin, queues)
    };
    let (mut stays, mut its_queues) = associate(rig.addr, HOSTNQN);
    for round in 0..3 {
        let (mut goes, mut gone) = associate(second, OTHER_HOST);
        // A queue does not join by another door than its controller's.
        for (addr, admin, host) in [(second, &stays, HOSTNQN), (rig.addr, &goes, OTHER_HOST)] {
            let mut wire = Wire::open(addr);
            wire.handshake();
            let refused = wire.connect_io(admin, host, 3, 32);
            assert_eq!((refused.code(), refused.result), (INVALID_PARAMETERS, CNTLID_AT), "round {round}");
        }
        for queue in &mut gone {
            for i in 0..8 {
                queue.submit(Sqe::rw(2, 1, i * 256, 255).sgl(TRANSPORT, 1 << 20), &[]);
            }
        }
        rig.ask(move |target, _| async move { target.remove_listener(SUBNQN, second).await });
        assert!(goes.is_closed());
        for queue in &mut gone {
            while queue.receive().is_some() {}
        }
        assert_eq!(rig.target.controllers(SUBNQN).unwrap().len(), 1);
        assert_eq!(rig.target.queues(SUBNQN).unwrap().len(), 3);
        for queue in &mut its_queues {
            assert!(queue.read(1, 0, 4096).ok());
        }
        assert!(stays.command(Sqe::new(0x18, 0), &[]).ok(), "keep alive");
        rig.ask(move |target, _| async move { target.add_listener(SUBNQN, second).await });
    }
    rig.check_health();
}

#[test]
fn removing_a_listener_cuts_who_came_by_it_and_frees_the_address() {
    let rig = Rig::start();
    let second = listen(&rig.target, SUBNQN);
    let (_admin, mut io) = rig.connect();
    let mut by_second = Wire::open(second);
    by_second.handshake();
    by_second.connect_admin(SUBNQN, OTHER_HOST).expect_ok();
    rig.ask(move |target, _| async move { target.remove_listener(SUBNQN, second).await });
    assert!(by_second.is_closed());
    assert!(std::net::TcpStream::connect(second).is_err());
    assert!(io.read(1, 0, 4096).ok());
    rig.ask(move |target, _| async move { target.add_listener(SUBNQN, second).await });
    let mut again = Wire::open(second);
    again.handshake();
    again.connect_admin(SUBNQN, OTHER_HOST).expect_ok();
}

#[test]
fn keep_alive_times_are_all_accepted_and_expiry_ends_the_association() {
    let rig = Rig::start();
    for kato in [0, 1, 5000, 30_000, 120_000, u32::MAX] {
        for subnqn in [SUBNQN, DISCOVERY] {
            let data = Wire::connect_data(0xFFFF, subnqn.as_bytes(), HOSTNQN.as_bytes(), HOSTID);
            let mut wire = rig.wire();
            assert!(wire.command(Wire::connect_sqe(0, 32, kato), &data).ok(), "{kato}");
            wire.enable();
            assert!(wire.command(Sqe::new(0x18, 0), &[]).ok(), "keep alive");
        }
    }
    // 400 ms: commands on any queue count; silence ends all queues.
    let data = Wire::connect_data(0xFFFF, SUBNQN.as_bytes(), HOSTNQN.as_bytes(), HOSTID);
    let mut admin = rig.wire();
    admin.cntlid = admin.command(Wire::connect_sqe(0, 32, 400), &data).result as u16;
    admin.enable();
    let mut io = rig.wire();
    io.connect_io(&admin, HOSTNQN, 1, 32).expect_ok();
    for _ in 0..10 {
        std::thread::sleep(Duration::from_millis(100));
        assert!(io.read(1, 0, 4096).ok());
    }
    let start = Instant::now();
    assert!(admin.is_closed() && io.is_closed());
    let waited = start.elapsed();
    assert!((Duration::from_millis(600)..Duration::from_secs(3)).contains(&waited), "{waited:?}");
    rig.check_health();
}

#[test]
fn a_reset_ends_the_io_queues_before_it_says_so() {
    let rig = Rig::start();
    let (mut admin, mut io) = rig.connect();
    for i in 0..32 {
        io.submit(Sqe::rw(2, 1, i * 256, 255).sgl(TRANSPORT, 1 << 20), &[]);
    }
    let event = admin.submit(Sqe::new(0x0C, 0), &[]);
    // The order in which the event request ends and the property is set is the target's.
    let set = admin.submit(Sqe::fabrics(0).dword(11, 0x14).dword(12, 0x0046_0000), &[]);
    let (first, second) = (admin.complete(&[]), admin.complete(&[]));
    assert_eq!((first.cid, first.code()), (event, 0x008));
    assert!(second.cid == set && second.ok());
    let deadline = Instant::now() + Duration::from_secs(5);
    while admin.property_get(0x1C, false).result & 1 != 0 {
        assert!(Instant::now() < deadline, "RDY stays");
    }
    while io.receive().is_some() {}
    assert_eq!(admin.identify(1, 0).code(), SEQUENCE, "not enabled");
    assert_eq!(rig.wire().connect_io(&admin, HOSTNQN, 1, 32).code(), SEQUENCE);
    admin.enable();
    let mut io = rig.wire();
    io.connect_io(&admin, HOSTNQN, 1, 32).expect_ok();
    assert!(io.read(1, 0, 4096).ok());
    rig.check_health();
}

#[test]
fn a_shutdown_is_processed_and_completes() {
    let rig = Rig::start();
    let (_other_admin, mut other) = rig.connect_as(OTHER_HOST, 32);
    for _ in 0..20 {
        let (mut admin, mut io) = rig.connect();
        for i in 0..16 {
            io.submit(Sqe::rw(2, 1, i * 256, 255).sgl(TRANSPORT, 1 << 20), &[]);
        }
        admin.property_set(0x14, 0x0046_4001).expect_ok();
        let deadline = Instant::now() + Duration::from_secs(5);
        loop {
            let csts = admin.property_get(0x1C, false).result;
            if csts >> 2 & 3 == 2 {
                break;
            }
            assert_eq!(csts >> 2 & 3, 1, "SHST");
            assert!(Instant::now() < deadline);
        }
        assert!(other.read(1, 0, 4096).ok());
    }
}

#[test]
fn properties_that_do_not_exist_are_refused() {
    let rig = Rig::start();
    let mut admin = rig.wire();
    admin.connect_admin(SUBNQN, HOSTNQN).expect_ok();
    assert_eq!(admin.property_get(0x08, false).result, 0x0002_0000, "VS");
    assert_eq!(admin.property_get(0, true).result & 0xFFFF, 1023, "CAP.MQES");
    for offset in [0x04, 0x0C, 0x18, 0x24, 0x28, 0x1000, 0xFFFF_FFFC] {
        admin.property_get(offset, false).expect_refused(0x002);
        admin.property_set(offset, 0).expect_refused(0x002);
    }
    for cc in [0x0046_0081, 0x0046_0801, 0x0046_0021, 0x0056_0001] {
        admin.property_set(0x14, cc).expect_refused(0x002);
    }
    admin.enable();
    admin.command(Sqe::fabrics(8), &[]).expect_refused(0x185);
    admin.command(Sqe::fabrics(0x33), &[]).expect_refused(0x001);
    rig.check_health();
}

#[test]
fn connections_are_limited() {
    let rig = Rig::build("ram:64MiB", |target| {
        let options = rimrock::target::TransportOptions { max_connections: 4, ..target.transport() };
        target.set_transport(options).unwrap();
    });
    let held: Vec<Wire> = (0..4).map(|_| rig.wire()).collect();
    assert!(Wire::open(rig.addr).is_closed(), "one too many");
    drop(held);
    rig.await_connections(0);
    rig.check_health();
}
