//! Profiles of links by the places of devices in the list of offers.

use crate::request::Request;
use galaxy_common::{DeviceName, LinkProfile, LinkType, ProfileError};
use std::collections::BTreeMap;

/// Every link that was measured between devices that may take part.
pub(crate) struct Links<'a> {
    names: Vec<&'a DeviceName>,
    /// The profiles of each type of link: that from one device to another at `from * devices + to`.
    of: BTreeMap<LinkType, Vec<Option<&'a LinkProfile>>>,
}

impl<'a> Links<'a> {
    pub fn new(request: &Request<'a>) -> Self {
        let names: Vec<&DeviceName> = request.offers.iter().map(|o| &o.name).collect();
        let n = names.len();
        let places: BTreeMap<_, _> =
            names.iter().enumerate().map(|(at, &name)| (name, at)).collect();
        let mut of: BTreeMap<LinkType, Vec<Option<&LinkProfile>>> = BTreeMap::new();
        for link in &request.profile.links {
            if let (Some(from), Some(to)) = (places.get(&link.from), places.get(&link.to)) {
                let all = of.entry(link.link).or_insert_with(|| vec![None; n * n]);
                all[from * n + to].get_or_insert(link);
            }
        }
        Self { names, of }
    }

    /// The link between two places.
    ///
    /// # Errors
    /// [`ProfileError::NoLink`].
    pub fn get(
        &self,
        link: LinkType,
        from: usize,
        to: usize,
    ) -> Result<&'a LinkProfile, ProfileError> {
        let known = self.of.get(&link).and_then(|all| all[from * self.names.len() + to]);
        known.ok_or_else(|| ProfileError::NoLink {
            from: self.names[from].clone(),
            to: self.names[to].clone(),
        })
    }
}
