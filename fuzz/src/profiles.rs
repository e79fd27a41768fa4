//! Profiles of devices and links, as devices send them and as files keep them.

use super::{Input, good};
use galaxy_common::{
    Bytes, ClusterProfile, DeviceProfile, LinkProfile, LinkType, Strategy, Wanted, WireType,
};
use galaxy_model::Formats;
use galaxy_planner::{Allowed, Offer, Request, Workload};
use serde::{Serialize, de::DeserializeOwned};
use std::fmt::Debug;

/// The shape key that all profiles must be of.
const SHAPE: &str = "s";

/// A profile of a device, of a link, or of a cluster, in postcard or in JSON.
pub(crate) fn profile(bytes: &[u8]) {
    let mut input = Input(bytes);
    let form = input.byte();
    match form % 6 {
        0 => read(postcard::from_bytes(input.0).map_err(|e| e.to_string()), device),
        1 => read(serde_json::from_slice(input.0).map_err(|e| e.to_string()), device),
        2 => read(postcard::from_bytes(input.0).map_err(|e| e.to_string()), link),
        3 => read(
            serde_json::from_slice(input.0).map_err(|e| e.to_string()),
            |links: Vec<LinkProfile>| links.into_iter().for_each(link),
        ),
        4 => read(postcard::from_bytes(input.0).map_err(|e| e.to_string()), cluster),
        _ => read(serde_json::from_slice(input.0).map_err(|e| e.to_string()), cluster),
    }
}

fn read<T>(decoded: Result<T, String>, then: impl FnOnce(T)) {
    if let Some(value) = good(decoded) {
        then(value);
    }
}

fn device(profile: DeviceProfile) {
    if good(profile.check(SHAPE)).is_none() {
        return;
    }
    survives(&profile);
    let (_, spread) = profile.noisiest().expect("it has tables");
    assert!(spread.is_finite());
    for table in &profile.tables {
        for size in [0.0, 0.5, 1.0, 100.0, 1e6] {
            let nanos = profile.nanos(table.kernel, &vec![size; table.axes.len()]);
            assert!(nanos.is_finite() && nanos >= 0.0, "{:?} takes {nanos}", table.kernel);
        }
    }
    cluster(ClusterProfile { devices: vec![profile], links: Vec::new() });
}

fn link(profile: LinkProfile) {
    if good(profile.check()).is_some() {
        survives(&profile);
    }
}

/// Checks that a profile decodes to the same again, in either encoding.
fn survives<T: Serialize + DeserializeOwned + PartialEq + Debug>(profile: &T) {
    let bytes = postcard::to_stdvec(profile).expect("a profile has a binary form");
    assert_eq!(&postcard::from_bytes::<T>(&bytes).expect("its own"), profile);
    let text = serde_json::to_vec(profile).expect("a profile has a JSON form");
    assert_eq!(&serde_json::from_slice::<T>(&text).expect("its own"), profile);
}

/// Checks that a planner that is given the profile refuses it, or predicts something.
fn cluster(profile: ClusterProfile) {
    profile.devices.iter().for_each(|device| {
        good(device.check(SHAPE));
    });
    profile.links.iter().for_each(|link| {
        good(link.check());
    });
    // A few devices and little work: only the planner's arithmetic is under test.
    let offers = profile.devices.iter().take(3).map(|device| Offer {
        name: device.device.clone(),
        budget: Bytes(1 << 40),
        threads: 1,
    });
    let offers: Vec<Offer> = offers.collect();
    let spec = galaxy_model::shape::Shape::bert(1, 32, 2).spec().expect("a BERT");
    let workload =
        Workload { generated: 0, texts: 1, lengths: vec![(16, 1.0)], wanted: Wanted::Hidden };
    let allowed = Allowed {
        strategy: Strategy::Auto,
        wires: vec![WireType::F32],
        links: vec![LinkType::Tls],
        tiles: None,
        exchange: None,
        max_rows: 16,
        cache: galaxy_common::Cache::NONE,
        reading: galaxy_common::Reading::Preload,
    };
    let request = Request {
        spec: &spec,
        formats: &Formats::default(),
        model: "m",
        fingerprint: "f",
        shape: SHAPE,
        offers: &offers,
        profile: &profile,
        workload: &workload,
        allowed: &allowed,
    };
    if let Some(planned) = good(galaxy_planner::plan(&request)) {
        let latency = planned.prediction.latency;
        assert!(latency.is_finite() && latency >= 0.0, "predicted to take {latency}");
    }
}
