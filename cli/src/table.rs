//! Text in columns.

/// Lines of columns, each as wide as its widest cell, indented by two.
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    rows.iter()
        .map(|row| {
            let cells: Vec<String> =
                row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:<width$}")).collect();
            format!("{}\n", format!("  {}", cells.join("  ")).trim_end())
        })
        .collect()
}

/// A row of a table.
pub fn row<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.iter().map(|&c| c.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let text = table(&[row(["device", "state"]), row(["ä", "ready"]), row(["x"])]);
        assert_eq!(text, "  device  state\n  ä       ready\n  x\n");
        assert_eq!(table(&[]), "");
        assert_eq!(table(&[row(["a"]), Vec::new()]), "  a\n\n");
    }
}
