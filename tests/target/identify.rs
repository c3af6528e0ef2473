//! Identify, features, log pages and events of an I/O controller.

use rimrock::device::{Device, OpenOptions};
use rimrock::reactor::block_on;
use rimrock::target::{Backend, NamespaceSpec, SubsystemSpec, TargetError};

use crate::client::*;

const INVALID_FIELD: u16 = 0x002;
const INVALID_NAMESPACE: u16 = 0x00B;
/// The highest NSID of the rig's subsystem.
const NN: u32 = 256;

fn le(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte))
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn ram(uri: &str) -> Backend {
    Backend::Device(Device::open(uri, OpenOptions::default()).unwrap())
}

fn identify_csi(admin: &mut Wire, cns: u8, nsid: u32, csi: u8) -> Completion {
    admin.get(Sqe::new(IDENTIFY, nsid).dword(10, cns.into()).dword(11, u32::from(csi) << 24), 4096)
}

#[test]
fn the_controller_says_what_it_is_and_can() {
    let rig = Rig::start();
    let mut admin = rig.admin();
    let id = admin.identify(1, 0).expect_ok();
    assert_eq!(id.len(), 4096);
    let serial = text(&id[4..24]);
    assert!(serial.len() == 20 && serial.bytes().all(|b| b.is_ascii_graphic() || b == b' '));
    assert_eq!(text(&id[24..64]).trim_end(), "Rimrock");
    assert_eq!(1u64 << (12 + id[77]), 1 << 20, "MDTS");
    assert_eq!(le(&id[80..84]), 0x0002_0000, "VER");
    assert_eq!(id[111], 1, "CNTRLTYPE");
    assert_eq!(le(&id[320..322]), 1, "KAS");
    assert_eq!((id[512], id[513]), (0x66, 0x44), "SQES, CQES");
    assert_eq!((le(&id[516..520]), le(&id[540..544])), (NN.into(), NN.into()), "NN, MNAN");
    assert_eq!(
        le(&id[520..522]),
        0x1CD,
        "ONCS: compare, dataset management, write zeroes, timestamp, verify, copy"
    );
    assert_eq!(le(&id[522..524]), 1, "FUSES: compare and write");
    assert_eq!(id[525] & 1, 0, "memory has no volatile write cache");
    assert_eq!(le(&id[536..540]) & 0x30_0003, 0x30_0001, "SGLS");
    assert_eq!(text(&id[768..1024]).trim_end_matches('\0'), SUBNQN);
    assert_eq!((le(&id[1792..1796]) * 16 - 64, le(&id[1796..1800]), id[1803]), (8192, 1, 1));
    // The same serial number after a restart.
    assert_eq!(Rig::start().admin().identify(1, 0).expect_ok()[4..24], id[4..24]);
}

#[test]
fn a_namespace_says_what_it_is() {
    let rig = Rig::start();
    let small = NamespaceSpec {
        eui64: Some([1, 2, 3, 4, 5, 6, 7, 8]),
        ..NamespaceSpec::new(ram("ram:8MiB?block_size=512"), "s")
    };
    assert_eq!(rig.target.add_namespace(SUBNQN, small).unwrap(), 2);
    let mut admin = rig.admin();
    let first = admin.identify(0, 1).expect_ok();
    let second = admin.identify(0, 2).expect_ok();
    assert_eq!((le(&first[0..8]), le(&first[8..16]), first[130]), (16384, 16384, 12));
    assert_eq!((le(&second[0..8]), second[130]), (16384, 9));
    assert_eq!(first[24] & 0x10, 0x10, "OPTPERF");
    let granules =
        |id: &[u8]| [le(&id[64..66]), le(&id[66..68]), le(&id[68..70]), le(&id[70..72]), le(&id[72..74])];
    assert_eq!(granules(&first), [0; 5], "NPWG, NPWA, NPDG, NPDA, NOWS of 4 KiB blocks");
    assert_eq!(granules(&second), [7, 7, 7, 7, 0]);
    assert_eq!((first[30], first[33], first[99]), (1, 0x09, 0), "NMIC, DLFEAT, NSATTR");
    assert_eq!(second[120..128], [1, 2, 3, 4, 5, 6, 7, 8]);
    let descriptors = admin.identify(3, 2).expect_ok();
    assert_eq!(descriptors[..4], [1, 8, 0, 0], "EUI-64");
    assert_eq!(descriptors[12..16], [2, 16, 0, 0], "NGUID");
    assert_eq!(descriptors[16..32], second[104..120]);
    assert_eq!(descriptors[32..36], [3, 16, 0, 0], "UUID");
    assert_eq!(descriptors[36..52], second[104..120]);
    assert_eq!(descriptors[52..57], [4, 1, 0, 0, 0], "CSI");
    assert!(descriptors[57..].iter().all(|&b| b == 0));
    assert_ne!(first[104..120], second[104..120]);
}

#[test]
fn nsids_are_judged_before_they_are_used() {
    let rig = Rig::start();
    let (mut admin, mut io) = rig.connect();
    for cns in [0x00, 0x03, 0x05, 0x08] {
        for nsid in [0, NN + 1, 0xFFFF_FFFE, 0xFFFF_FFFF] {
            let completion = admin.identify(cns, nsid);
            assert_eq!(completion.code(), INVALID_NAMESPACE, "CNS {cns:#x} NSID {nsid:#x}");
        }
        for nsid in [2, NN] {
            let completion = admin.identify(cns, nsid);
            if cns == 3 {
                completion.expect_refused(INVALID_NAMESPACE);
            } else {
                assert!(completion.expect_ok().iter().all(|&b| b == 0), "inactive is zero filled");
            }
        }
        assert!(admin.identify(cns, 1).ok());
    }
    for nsid in [0, 2, NN, NN + 1, 0xFFFF_FFFE, 0xFFFF_FFFF] {
        io.get(Sqe::rw(2, nsid, 0, 0), 4096).expect_refused(INVALID_NAMESPACE);
        io.command(Sqe::rw(1, nsid, 0, 0).sgl(IN_CAPSULE, 4096), &[0; 4096])
            .expect_refused(INVALID_NAMESPACE);
        io.command(Sqe::rw(8, nsid, 0, 0), &[]).expect_refused(INVALID_NAMESPACE);
        io.command(Sqe::new(9, nsid).dword(11, 4).sgl(IN_CAPSULE, 16), &[0; 16])
            .expect_refused(INVALID_NAMESPACE);
        if nsid != 0xFFFF_FFFF {
            io.command(Sqe::new(0, nsid), &[]).expect_refused(INVALID_NAMESPACE);
        }
    }
    assert!(io.command(Sqe::new(0, 0xFFFF_FFFF), &[]).ok(), "flush of all namespaces");
    rig.check_health();
}

#[test]
fn structures_hosts_ask_for_exist_and_others_are_refused_calmly() {
    let rig = Rig::start();
    let mut admin = rig.admin();
    for (cns, nsid) in [(0x05, 1), (0x06, 0), (0x07, 0), (0x08, 1), (0x1A, 0), (0x1B, 1), (0x1C, 0)] {
        assert!(identify_csi(&mut admin, cns, nsid, 0).ok() || cns == 0x1C, "CNS {cns:#x}");
    }
    let sets = admin.get(Sqe::new(IDENTIFY, 0).dword(10, 0x1C | 0xFFFF << 16), 4096).expect_ok();
    assert_eq!((le(&sets[..8]), le(&sets[8..16])), (1, 0));
    for csi in [1, 2, 0xFF] {
        for cns in [0x05, 0x06, 0x07, 0x1A, 0x1B] {
            identify_csi(&mut admin, cns, 1, csi).expect_refused(INVALID_FIELD);
        }
    }
    for cns in [0x04, 0x0A, 0x14, 0x7F, 0xFF] {
        admin.identify(cns, 1).expect_refused(INVALID_FIELD);
    }
    for nsid in [0xFFFF_FFFF, 5] {
        assert!(admin.identify(1, nsid).ok(), "the controller has no NSID");
    }
    let list = admin.identify(2, 0).expect_ok();
    assert_eq!((le(&list[..4]), le(&list[4..8])), (1, 0));
    admin.identify(2, 0xFFFF_FFFE).expect_refused(INVALID_NAMESPACE);
    let controllers = admin.identify(0x13, 0).expect_ok();
    assert_eq!((le(&controllers[..2]), le(&controllers[2..4])), (1, admin.cntlid.into()));
    admin.get(Sqe::new(IDENTIFY, 0).dword(10, 1), 512).expect_refused(0x00F);
    for opcode in [0x00, 0x01, 0x04, 0x05, 0x0D, 0x10, 0x14, 0x80, 0x84, 0xC0, 0xFF] {
        admin.command(Sqe::new(opcode, 0), &[]).expect_refused(0x001);
    }
    rig.check_health();
}

#[test]
fn identities_are_unique_and_sizes_sane() {
    let rig = Rig::start();
    let uuid = rig.device.info().uuid;
    let twice = NamespaceSpec::new(Backend::Device(rig.device.clone()), "again");
    let refused = rig.target.add_namespace(SUBNQN, twice.clone());
    assert!(
        matches!(refused, Err(TargetError::DuplicateIdentity { what: "uuid", nsid: 1, .. })),
        "{refused:?}"
    );
    let nguid = NamespaceSpec { nguid: Some(*uuid.as_bytes()), ..NamespaceSpec::new(ram("ram:1MiB"), "n") };
    let refused = rig.target.add_namespace(SUBNQN, nguid);
    assert!(matches!(refused, Err(TargetError::DuplicateIdentity { what: "nguid", .. })), "{refused:?}");
    let wrong = NamespaceSpec { block_size: 512, ..NamespaceSpec::new(ram("ram:1MiB"), "b") };
    assert!(matches!(rig.target.add_namespace(SUBNQN, wrong), Err(TargetError::BlockSize { .. })));
    for nsid in [0, NN + 1, u32::MAX] {
        let spec = NamespaceSpec { nsid: Some(nsid), ..NamespaceSpec::new(ram("ram:1MiB"), "x") };
        assert!(matches!(rig.target.add_namespace(SUBNQN, spec), Err(TargetError::NamespaceId { .. })));
    }
    // Another subsystem may have the same one.
    rig.target.create_subsystem(SubsystemSpec::new("nqn.2024-01.io.rimrock:second")).unwrap();
    assert_eq!(rig.target.add_namespace("nqn.2024-01.io.rimrock:second", twice).unwrap(), 1);
    let same = SubsystemSpec { serial_number: "S1".into(), ..SubsystemSpec::new("nqn.2024-01.io.rimrock:a") };
    rig.target.create_subsystem(same.clone()).unwrap();
    let same = SubsystemSpec { nqn: "nqn.2024-01.io.rimrock:b".into(), ..same };
    assert!(matches!(rig.target.create_subsystem(same), Err(TargetError::SerialInUse { .. })));
    for (serial, model) in
        [("123456789012345678901", "m"), ("s", &*"m".repeat(41)), ("ü", "m"), ("s", "a\nb")]
    {
        let spec = SubsystemSpec {
            serial_number: serial.into(),
            model_number: model.into(),
            ..SubsystemSpec::new("nqn.2024-01.io.rimrock:c")
        };
        assert!(rig.target.create_subsystem(spec).is_err(), "{serial:?} {model:?}");
    }
}

#[test]
fn features_are_set_and_read_back() {
    let rig = Rig::start();
    let mut admin = rig.admin();
    let granted = admin.set_feature(0x07, 0xFFFE_FFFE);
    assert!(granted.ok() && granted.result == 0x007F_007F, "{granted:?}");
    assert_eq!(admin.set_feature(0x07, 0x0003_0003).result, 0x0003_0003);
    assert_eq!(admin.get_feature(0x07).result, 0x0003_0003);
    admin.set_feature(0x07, 0xFFFF_0000).expect_refused(INVALID_FIELD);
    for (fid, value) in
        [(0x01, 0x0707_0703), (0x04, 0x0157), (0x05, 5), (0x0A, 1), (0x0B, 0x100), (0x0F, 5000)]
    {
        assert!(admin.set_feature(fid, value).ok(), "{fid:#x}");
        assert_eq!(admin.get_feature(fid).result, u64::from(value), "{fid:#x}");
    }
    assert!(admin.set_feature(0x02, 0).ok());
    admin.set_feature(0x02, 3).expect_refused(INVALID_FIELD);
    admin.set_feature(0x06, 1).expect_refused(INVALID_FIELD);
    admin.set_feature(0x81, 1).expect_refused(0x00C);
    for fid in [0x00, 0x03, 0x11, 0x80, 0xFF] {
        admin.set_feature(fid, 0).expect_refused(INVALID_FIELD);
        admin.get_feature(fid).expect_refused(INVALID_FIELD);
    }
    let host = admin.get(Sqe::new(0x0A, 0).dword(10, 0x81).dword(11, 1), 16).expect_ok();
    assert_eq!(host, HOSTID);
    // Data in the capsule and data that is asked for.
    let time = 0x0123_4567_89AB_u64;
    let set = Sqe::new(0x09, 0).dword(10, 0x0E);
    assert!(admin.command(set.sgl(IN_CAPSULE, 8), &time.to_le_bytes()).ok());
    let got = le(&admin.get(Sqe::new(0x0A, 0).dword(10, 0x0E), 8).expect_ok());
    assert!(got & 0xFFFF_FFFF_FFFF >= time && got >> 48 == 2);
    admin.submit(set.sgl(TRANSPORT, 8), &[]);
    assert!(admin.complete(&time.to_le_bytes()).ok());
    admin.command(set.sgl(IN_CAPSULE, 4), &[0; 4]).expect_refused(0x00F);
    let mut io = rig.wire();
    io.connect_io(&admin, HOSTNQN, 4, 32).expect_ok();
    admin.set_feature(0x07, 0).expect_refused(0x00C);
    assert_eq!(rig.wire().connect_io(&admin, HOSTNQN, 5, 32).result, 42, "above what was granted");
}

#[test]
fn log_pages_are_whole_and_cut_by_offset() {
    let rig = Rig::start();
    let (mut admin, mut io) = rig.connect();
    for i in 0..10 {
        assert!(io.read(1, i, 4096).ok());
    }
    let smart = admin.log_page(0x02, 0, 512, true).expect_ok();
    assert_eq!((le(&smart[64..80]), le(&smart[32..48])), (10, 1), "commands and units read");
    admin.identify(0x7F, 9).expect_refused(INVALID_FIELD);
    let errors = admin.log_page(0x01, 0, 64 * 64, true).expect_ok();
    assert_eq!((le(&errors[..8]), le(&errors[12..14]) >> 1 & 0x7FF, le(&errors[24..28])), (1, 2, 9));
    let firmware = admin.log_page(0x03, 0, 512, true).expect_ok();
    assert_eq!((firmware[0], text(&firmware[8..16]).trim_end()), (1, env!("CARGO_PKG_VERSION")));
    let effects = admin.log_page(0x05, 0, 4096, true).expect_ok();
    assert_eq!((effects[0x06 * 4], effects[1024 + 4], effects[1024 + 4 * 4]), (1, 3, 0));
    let tail = admin.log_page(0x05, 1024, 64, true).expect_ok();
    assert_eq!(tail, effects[1024..1088]);
    let supported = admin.log_page(0x00, 0, 1024, true).expect_ok();
    let list: Vec<usize> = (0..256).filter(|lid| supported[lid * 4] & 1 == 1).collect();
    assert_eq!(list, [0, 1, 2, 3, 4, 5, 13]);
    for offset in [2, 4096, 4100, u64::MAX - 3] {
        admin.log_page(0x05, offset, 64, true).expect_refused(INVALID_FIELD);
    }
    for lid in [0x06, 0x0C, 0x70, 0x80, 0xC0, 0xFF] {
        admin.log_page(lid, 0, 512, true).expect_refused(0x109);
    }
    // Longer than any transfer may be, and longer than the host takes.
    admin.log_page(0x02, 0, 2 << 20, true).expect_refused(INVALID_FIELD);
    admin.get(Sqe::new(0x02, 0).dword(10, 2 | 127 << 16), 256).expect_refused(0x00F);
    let per_namespace = Sqe::new(0x02, 1).dword(10, 2 | 127 << 16);
    admin.get(per_namespace, 512).expect_refused(INVALID_FIELD);
}

#[test]
fn one_event_per_change_until_the_list_was_read() {
    let rig = Rig::start();
    let mut admin = rig.admin();
    assert!(admin.set_feature(0x0B, 0x100).ok());
    let event = admin.submit(Sqe::new(0x0C, 0), &[]);
    let add = |nsid| {
        let spec = NamespaceSpec { nsid: Some(nsid), ..NamespaceSpec::new(ram("ram:1MiB"), "x") };
        rig.target.add_namespace(SUBNQN, spec).unwrap();
    };
    let remove = |nsid| rig.ask(move |target, _| async move { target.remove_namespace(SUBNQN, nsid).await });
    add(2);
    let first = admin.complete(&[]);
    assert_eq!((first.cid, first.result), (event, 0x0004_0002));
    add(3);
    remove(2);
    let event = admin.submit(Sqe::new(0x0C, 0), &[]);
    let list = |admin: &mut Wire, rae| {
        let page = admin.log_page(0x04, 0, 4096, rae).expect_ok();
        page.chunks(4).map(le).take_while(|&nsid| nsid != 0).collect::<Vec<_>>()
    };
    assert_eq!(list(&mut admin, true), [2, 3], "and no event came before this answer");
    assert_eq!(list(&mut admin, false), [2, 3]);
    assert_eq!(list(&mut admin, false), [0u64; 0]);
    add(4);
    let second = admin.complete(&[]);
    assert_eq!((second.cid, second.result), (event, 0x0004_0002));
    assert_eq!(list(&mut admin, false), [4]);
    // The limit, and what Abort does to one that waits.
    let waiting: Vec<u16> = (0..4).map(|_| admin.submit(Sqe::new(0x0C, 0), &[])).collect();
    admin.command(Sqe::new(0x0C, 0), &[]).expect_refused(0x105);
    let abort = admin.submit(Sqe::new(0x08, 0).dword(10, u32::from(waiting[2]) << 16), &[]);
    let (ended, aborted) = (admin.complete(&[]), admin.complete(&[]));
    assert_eq!((ended.cid, ended.code()), (waiting[2], 0x007));
    assert_eq!((aborted.cid, aborted.code(), aborted.result), (abort, 0, 0));
    rig.check_health();
}

#[test]
fn more_changes_than_the_list_holds_are_shown_as_one() {
    let rig = Rig::start();
    rig.ask(|target, _| async move { target.delete_subsystem(SUBNQN).await });
    let wide = SubsystemSpec { max_namespaces: 2000, allow_any_host: true, ..SubsystemSpec::new(SUBNQN) };
    rig.target.create_subsystem(wide).unwrap();
    let addr = listen(&rig.target, SUBNQN);
    let mut admin = Wire::open(addr);
    admin.handshake();
    admin.connect_admin(SUBNQN, HOSTNQN).expect_ok();
    admin.enable();
    for nsid in 1..=1025 {
        let spec = NamespaceSpec { nsid: Some(nsid), ..NamespaceSpec::new(ram("ram:4KiB"), "x") };
        rig.target.add_namespace(SUBNQN, spec).unwrap();
    }
    let page = admin.log_page(0x04, 0, 4096, false).expect_ok();
    assert_eq!((le(&page[..4]), le(&page[4..8])), (0xFFFF_FFFF, 0));
    let page = admin.log_page(0x04, 0, 4096, false).expect_ok();
    assert_eq!(le(&page[..4]), 0);
    // All of them are listed, in two pages.
    let first = admin.identify(2, 0).expect_ok();
    assert_eq!((le(&first[..4]), le(&first[4092..])), (1, 1024));
    let second = admin.identify(2, 1024).expect_ok();
    assert_eq!((le(&second[..4]), le(&second[4..8])), (1025, 0));
}

#[test]
fn a_namespace_replaced_under_the_same_nsid_is_another_one() {
    let rig = Rig::start();
    let (mut admin, mut io) = rig.connect();
    assert!(admin.set_feature(0x0B, 0x100).ok());
    admin.submit(Sqe::new(0x0C, 0), &[]);
    let before = admin.identify(3, 1).expect_ok();
    let target = rig.target.clone();
    block_on(async move { target.remove_namespace(SUBNQN, 1).await }).unwrap();
    assert_eq!(admin.complete(&[]).result, 0x0004_0002);
    io.read(1, 0, 4096).expect_refused(INVALID_NAMESPACE);
    let spec = NamespaceSpec { nsid: Some(1), ..NamespaceSpec::new(ram("ram:8MiB?block_size=512"), "new") };
    rig.target.add_namespace(SUBNQN, spec).unwrap();
    let after = admin.identify(3, 1).expect_ok();
    assert_ne!(before, after);
    assert_eq!(admin.identify(0, 1).expect_ok()[130], 9);
    assert!(io.get(Sqe::rw(2, 1, 0, 7), 4096).ok());
}
