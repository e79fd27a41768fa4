//! Pairwise combinations: every pair of values of any two factors is in some row.

/// Rows (a value's index for each factor) that together hold every pair. `sizes` are the numbers of values of
/// each factor. The result is greedy and deterministic, a few rows above the fewest possible.
pub fn pairwise(sizes: &[usize]) -> Vec<Vec<usize>> {
    let mut open = std::collections::BTreeSet::new();
    for (i, &a) in sizes.iter().enumerate() {
        for (j, &b) in sizes.iter().enumerate().skip(i + 1) {
            for x in 0..a {
                open.extend((0..b).map(|y| (i, x, j, y)));
            }
        }
    }
    let mut rows = Vec::new();
    while let Some(&(i, x, j, y)) = open.first() {
        let mut row: Vec<Option<usize>> = vec![None; sizes.len()];
        (row[i], row[j]) = (Some(x), Some(y));
        for factor in 0..sizes.len() {
            if row[factor].is_some() {
                continue;
            }
            // The value that closes most open pairs with what is chosen; rotated so that ties do not always
            // go to the first.
            let gain = |value: &usize| {
                let pairs = row.iter().enumerate().filter_map(|(other, v)| v.map(|v| (other, v)));
                pairs
                    .filter(|&(other, v)| {
                        let (a, b) = ((factor, *value), (other, v));
                        let (a, b) = if a.0 < b.0 { (a, b) } else { (b, a) };
                        open.contains(&(a.0, a.1, b.0, b.1))
                    })
                    .count()
            };
            let turn = rows.len();
            let order = (0..sizes[factor]).map(|v| (v + turn) % sizes[factor]);
            row[factor] = order.max_by_key(gain);
        }
        let row: Vec<usize> = row.into_iter().map(Option::unwrap_or_default).collect();
        open.retain(|&(i, x, j, y)| row[i] != x || row[j] != y);
        rows.push(row);
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_of_factor_values_is_covered() {
        let sizes = [7, 3, 4, 2, 5];
        let rows = pairwise(&sizes);
        for i in 0..sizes.len() {
            for j in i + 1..sizes.len() {
                for x in 0..sizes[i] {
                    for y in 0..sizes[j] {
                        assert!(rows.iter().any(|r| r[i] == x && r[j] == y));
                    }
                }
            }
        }
        assert!(rows.len() < 60, "{}", rows.len());
    }
}
